"""Baton serves language models as distributed workers: one contract and one set of roles over every engine."""

__version__ = "0.1.0"
