"""The echo engine: deterministic text from the prompt, at any pace. The template for engine authors."""

from baton.config.engines import EchoOptions
from baton.engines.echo.engine import EchoEngine

__all__ = ["EchoEngine", "EchoOptions"]
