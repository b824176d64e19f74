"""The life of one request in a worker: admission gate, tracker, cancel scope. Knows no role and no engine."""
