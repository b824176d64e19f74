"""Models on disk: finding their directory, reading their configuration, tokenizer and chat template."""
