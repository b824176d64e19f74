"""Roles. A handler knows what a request of its role needs and nothing of the engine that does it."""
