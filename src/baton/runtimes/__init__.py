"""Runtimes: how requests travel between processes. They know neither roles nor engines."""
