"""openai-python, with strict validation of every answer."""

from typing import Any

import openai
from program import GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run, weather

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": weather.__doc__,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO: Any = [{"role": "user", "content": GREETING}]


def client(server: Server, key: str | None = None, strict: bool = True) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.base_url,
        api_key=server.key if key is None else key,
        max_retries=0,
        timeout=60,
        _strict_response_validation=strict,
    )


def chat(server: Server) -> Any:
    return client(server).chat.completions.create(model=server.model, messages=HELLO).choices[0].message.content


def stream(server: Server) -> Any:
    chunks = client(server).chat.completions.create(model=server.model, messages=HELLO, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


def unknown_model(server: Server) -> Any:
    return client(server).chat.completions.create(model=UNKNOWN_MODEL, messages=HELLO)


def bad_parameter(server: Server) -> Any:
    return client(server).chat.completions.create(model=server.model, messages=HELLO, temperature=TOO_HOT)


def wrong_key(server: Server) -> Any:
    return client(server, WRONG_KEY).chat.completions.create(model=server.model, messages=HELLO)


def error_fields(server: Server) -> Any:
    """The fields of the envelope, which the client takes from `error`."""
    try:
        return bad_parameter(server)
    except openai.BadRequestError as error:
        return {"param": error.param, "type": error.type, "code": error.code, "request_id": error.request_id}


def completion(server: Server) -> Any:
    answer = client(server).completions.create(model=server.model, prompt=GREETING, max_tokens=13)
    return answer.choices[0].text


def completion_default_length(server: Server) -> Any:
    answer = client(server).completions.create(model=server.model, prompt="0123456789" * 4)
    return [answer.usage and answer.usage.completion_tokens, answer.choices[0].finish_reason]


def completion_stream(server: Server) -> Any:
    # Not strict: the package's type of a completion chunk does not allow the null that OpenAI sends.
    chunks = client(server, strict=False).completions.create(
        model=server.model, prompt=GREETING, max_tokens=13, stream=True
    )
    return [chunk.choices[0].text for chunk in chunks]


def models(server: Server) -> Any:
    return [[model.id, model.owned_by] for model in client(server).models.list()]


def unknown_model_retrieved(server: Server) -> Any:
    return client(server).models.retrieve(UNKNOWN_MODEL)


def tool_loop(server: Server) -> Any:
    messages: Any = [{"role": "user", "content": PARIS}]
    asked = client(server).chat.completions.create(model=server.model, messages=messages, tools=[TOOL])
    call: Any = (asked.choices[0].message.tool_calls or [None])[0]
    messages += [
        asked.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": weather("Paris")},
    ]
    answer = client(server).chat.completions.create(model=server.model, messages=messages, tools=[TOOL])
    return [call.function.name, call.function.arguments, answer.choices[0].message.content]


def request_id(server: Server) -> Any:
    answer = client(server).chat.completions.create(
        model=server.model, messages=HELLO, extra_headers={"x-request-id": "given-by-the-client"}
    )
    return answer._request_id


if __name__ == "__main__":
    run(
        *(chat, stream, unknown_model, bad_parameter, wrong_key, error_fields, completion, completion_default_length),
        *(completion_stream, models, unknown_model_retrieved, tool_loop, request_id),
    )
