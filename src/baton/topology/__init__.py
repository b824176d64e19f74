"""Processes: what `baton serve` starts, watches, restarts and stops."""
