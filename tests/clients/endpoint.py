"""What the clients talk to: its key, its model and the answers of its script."""

from pathlib import Path

ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients"
KEY = "sk-the-right-key"
MODEL = "qwen"
GREETING = "Hello, world."
ANSWER = "Hello! How can I help?"
UNKNOWN_MODEL = "no-such-model"


def call(city: str) -> str:
    """Return a call of the tool, as a model of the Qwen family writes it."""
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


# The first text that is in the prompt decides, so the later turns of a conversation come first.
SCRIPT = {
    "sunny in Rome": "It is sunny in Rome.",
    "And in Rome?": call("Rome"),
    "sunny in Paris": "It is sunny in Paris.",
    "weather in Paris": call("Paris"),
    GREETING: ANSWER,
}
