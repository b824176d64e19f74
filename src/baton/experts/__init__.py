"""Expert placement for mixture-of-experts models: the offline planner behind `baton experts`."""
