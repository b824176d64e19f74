"""LiteLLM, with its providers for endpoints that speak the OpenAI and the Anthropic API."""

from typing import Any

import litellm
from program import GREETING, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run

litellm.suppress_debug_info = True


def ask(server: Server, **changes: Any) -> Any:
    options = {
        "model": f"hosted_vllm/{server.model}",
        "api_base": server.base_url,
        "api_key": server.key,
        "messages": [{"role": "user", "content": GREETING}],
        "num_retries": 0,
        "timeout": 60,
    }
    return litellm.completion(**(options | changes))


def chat(server: Server) -> Any:
    return ask(server).choices[0].message.content


def stream(server: Server) -> Any:
    return [chunk.choices[0].delta.content or "" for chunk in ask(server, stream=True)]


def unknown_model(server: Server) -> Any:
    return ask(server, model=f"hosted_vllm/{UNKNOWN_MODEL}")


def bad_parameter(server: Server) -> Any:
    return ask(server, temperature=TOO_HOT)


def wrong_key(server: Server) -> Any:
    return ask(server, api_key=WRONG_KEY)


def as_openai(server: Server) -> Any:
    return ask(server, model=f"openai/{server.model}").choices[0].message.content


def as_anthropic(server: Server) -> Any:
    answer = ask(server, model=f"anthropic/{server.model}", api_base=server.url, max_tokens=64)
    return answer.choices[0].message.content


if __name__ == "__main__":
    run(chat, stream, unknown_model, bad_parameter, wrong_key, as_openai, as_anthropic)
