"""The systems Baton is measured against; each is a small program that runs in its own process."""
