"""Commands of operators: the state machine, its executor, and the control API."""
