"""One Protocol per outside thing. Small, documented and stable: the heart of the project."""
