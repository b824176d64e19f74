"""The system server of a worker: health, metrics and the operator's routes, over HTTP."""
