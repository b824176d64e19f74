"""The echo engine: deterministic text from the prompt, at any pace. The template for engine authors."""

from baton.engines.echo.engine import EchoEngine
from baton.engines.echo.options import EchoOptions

__all__ = ["EchoEngine", "EchoOptions"]
