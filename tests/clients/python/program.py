"""What the client programs share: each runs in an environment of its own and prints what a user of its client sees."""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

GREETING = "Hello, world."
PARIS = "What is the weather in Paris?"
UNKNOWN_MODEL = "no-such-model"
WRONG_KEY = "wrong-key"
TOO_HOT = 2.5


class Server(NamedTuple):
    """The endpoint, with a key that it accepts, and the name of its model."""

    url: str
    key: str
    model: str

    @property
    def base_url(self) -> str:
        """The base URL as clients of the OpenAI API take it."""
        return f"{self.url}/v1"


def run(*parts: Callable[[Server], Any]) -> None:
    """Call each part with the server of the command line; print their results, by name, as one line of JSON."""
    server = Server(**json.loads(sys.argv[1]))
    print(json.dumps({part.__name__: attempt(part, server) for part in parts}, default=str))


def attempt(part: Callable[[Server], Any], server: Server) -> Any:
    """Return what `part` returns; if it raises, what its user would read."""
    try:
        return part(server)
    except Exception as error:  # noqa: BLE001 - whatever the client raises is its result
        status = getattr(error, "status_code", None)
        return {"raised": type(error).__name__, "status": status, "text": str(error)}


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"
