"""pydantic-ai: an agent, with a tool."""

import asyncio
from typing import Any

from program import GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run, weather
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(server: Server, model: str | None = None, key: str | None = None) -> Agent[None, str]:
    provider = OpenAIProvider(base_url=server.base_url, api_key=key or server.key)
    return Agent(OpenAIChatModel(model or server.model, provider=provider), retries=0)


def chat(server: Server) -> Any:
    return agent(server).run_sync(GREETING).output


def stream(server: Server) -> Any:
    async def read() -> list[str]:
        async with agent(server).run_stream(GREETING) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    return asyncio.run(read())


def unknown_model(server: Server) -> Any:
    return agent(server, model=UNKNOWN_MODEL).run_sync(GREETING).output


def bad_parameter(server: Server) -> Any:
    return agent(server).run_sync(GREETING, model_settings={"temperature": TOO_HOT}).output


def wrong_key(server: Server) -> Any:
    return agent(server, key=WRONG_KEY).run_sync(GREETING).output


def tool_loop(server: Server) -> Any:
    cities: list[str] = []
    helper = agent(server)

    @helper.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather in a city."""
        cities.append(city)
        return weather(city)

    return [helper.run_sync(PARIS).output, cities]


if __name__ == "__main__":
    run(chat, stream, unknown_model, bad_parameter, wrong_key, tool_loop)
