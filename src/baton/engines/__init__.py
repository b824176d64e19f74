"""Engine adapters, one package each. An adapter knows its engine and nothing of roles."""
