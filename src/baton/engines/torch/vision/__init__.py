"""Vision towers of the built-in engine, and the preprocessing of their media."""
