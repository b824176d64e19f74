"""Model code of the built-in engine."""
