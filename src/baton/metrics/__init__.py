"""Prometheus counters of a worker, and the text that `/metrics` returns."""
