"""The systems Baton is measured against; each is a small program run as a process of its own."""
