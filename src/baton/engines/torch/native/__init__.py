"""The step of the built-in engine in native code, for CPUs: compiled on first use, optional everywhere."""
