"""SGLang behind the engine port."""
