"""Models on disk: finding their directory, reading their configuration, their tokenizer and chat template."""
