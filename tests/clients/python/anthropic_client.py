"""The Anthropic SDK."""

from typing import Any

import anthropic
from program import GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run, weather

TOOL: Any = {
    "name": "get_weather",
    "description": weather.__doc__,
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO: Any = [{"role": "user", "content": GREETING}]


def client(server: Server, key: str | None = None) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url,
        api_key=key or server.key,
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    )


def create(server: Server, key: str | None = None, **changes: Any) -> Any:
    options = {"model": server.model, "max_tokens": 64, "messages": HELLO}
    return client(server, key).messages.create(**(options | changes))


def chat(server: Server) -> Any:
    message = create(server)
    return "".join(block.text for block in message.content)


def stream(server: Server) -> Any:
    with client(server).messages.stream(model=server.model, max_tokens=64, messages=HELLO) as events:
        return list(events.text_stream)


def stream_events(server: Server) -> Any:
    kinds = [event.type for event in create(server, stream=True)]
    return [kind for number, kind in enumerate(kinds) if number == 0 or kind != kinds[number - 1]]


def usage(server: Server) -> Any:
    message = create(server, max_tokens=5)
    return [message.stop_reason, message.usage.output_tokens, message.role, message.type]


def system_prompt(server: Server) -> Any:
    return create(server, system="Be brief.").content[0].text


def stop_sequence(server: Server) -> Any:
    message = create(server, stop_sequences=["How"])
    return [message.content[0].text, message.stop_reason, message.stop_sequence]


def tool_loop(server: Server) -> Any:
    question = {"role": "user", "content": PARIS}
    asked = create(server, messages=[question], tools=[TOOL])
    call = next(block for block in asked.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(call.input["city"])}
    turns = [
        question,
        {"role": "assistant", "content": [block.model_dump() for block in asked.content]},
        {"role": "user", "content": [result]},
    ]
    answer = create(server, messages=turns, tools=[TOOL])
    return [asked.stop_reason, call.name, call.input, answer.content[0].text]


def unknown_model(server: Server) -> Any:
    return create(server, model=UNKNOWN_MODEL)


def bad_parameter(server: Server) -> Any:
    return create(server, extra_body={"temperature": TOO_HOT})


def wrong_key(server: Server) -> Any:
    return create(server, key=WRONG_KEY)


def error_envelope(server: Server) -> Any:
    """The body of an error, as Anthropic documents it."""
    try:
        return unknown_model(server)
    except anthropic.APIStatusError as error:
        return error.body


if __name__ == "__main__":
    run(
        *(chat, stream, stream_events, usage, system_prompt, stop_sequence, tool_loop),
        *(unknown_model, bad_parameter, wrong_key, error_envelope),
    )
