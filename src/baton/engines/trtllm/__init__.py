"""TensorRT-LLM behind the engine port. `adapter.TrtllmEngine` is the engine; the library is imported late."""
