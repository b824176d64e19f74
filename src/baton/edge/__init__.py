"""The HTTP edge: the public OpenAI endpoint in front of the runtime's frontend."""
