"""Stands in for IPython: SGLang imports two names of it, which only notebooks use."""
