"""What an operator can ask of a worker: routes, orders to the engine, and the worker's place in discovery."""
