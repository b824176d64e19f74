"""The built-in engine: real models on any machine, with paged KV, continuous batching and prefix reuse."""
