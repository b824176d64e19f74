"""Measurements of Baton against peers in the same run; nothing in the package imports this."""
