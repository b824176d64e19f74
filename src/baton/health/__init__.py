"""Health checks of a worker: the canary and the watchdog."""
