"""An operator's orders to a worker, and the worker's place in discovery."""
