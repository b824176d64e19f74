"""instructor: structured output, by a JSON schema and by a tool."""

from typing import Any, Literal

import instructor
import openai
from program import GREETING, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run
from pydantic import BaseModel


class City(BaseModel):
    """A city and where it is."""

    name: Literal["Paris", "Rome"]
    continent: Literal["Africa", "Asia", "Europe"]
    capital: bool


def client(server: Server, key: str | None = None, mode: instructor.Mode = instructor.Mode.JSON_SCHEMA) -> Any:
    plain = openai.OpenAI(base_url=server.base_url, api_key=key or server.key, max_retries=0, timeout=100)
    return instructor.from_openai(plain, mode=mode)


def ask(server: Server, text: str, key: str | None = None, **changes: Any) -> Any:
    options = {
        "model": server.model,
        "messages": [{"role": "user", "content": text}],
        "max_retries": 1,
        "temperature": 0.0,
        "max_tokens": 100,
    }
    mode = changes.pop("mode", instructor.Mode.JSON_SCHEMA)
    return client(server, key, mode).create(response_model=City, **(options | changes))


def structured(server: Server) -> Any:
    return ask(server, "Which city has the Eiffel tower?").model_dump()


def structured_by_tool(server: Server) -> Any:
    return ask(server, "Which city has the Eiffel tower?", mode=instructor.Mode.TOOLS).model_dump()


def unknown_model(server: Server) -> Any:
    return ask(server, GREETING, model=UNKNOWN_MODEL)


def bad_parameter(server: Server) -> Any:
    return ask(server, GREETING, temperature=TOO_HOT)


def wrong_key(server: Server) -> Any:
    return ask(server, GREETING, key=WRONG_KEY)


if __name__ == "__main__":
    run(structured, structured_by_tool, unknown_model, bad_parameter, wrong_key)
