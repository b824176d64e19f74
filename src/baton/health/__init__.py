"""Whether this worker still does its job: a canary that asks, and a watchdog that looks."""
