"""Where the experts of a mixture model go: the offline planner behind `baton experts`."""
