"""The Dynamo runtime (PyPI `ai-dynamo-runtime`): discovery, request plane, OpenAI frontend. Its only importer."""
