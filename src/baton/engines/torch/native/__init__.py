"""The step of the built-in engine in C++ for CPUs: compiled on first use, optional."""
