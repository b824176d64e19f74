"""Checks of the machine and the settings for `baton doctor`."""
