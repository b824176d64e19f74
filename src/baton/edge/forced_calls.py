"""Whole answers with a forced tool call, joined from a stream. Pure functions.

The frontend parses the call of a whole answer when it is complete, and drops a call that was cut by length. In a stream
it returns the call piece by piece. So a request with a forced call is sent as a stream, and its events are joined.
"""

from typing import cast

import msgspec

Json = dict[str, object]

_DATA = b"data: "
_DONE = b"[DONE]"
_JOINED_TEXTS = ("content", "reasoning_content", "refusal")

_decode = msgspec.json.Decoder(Json).decode


def as_stream(body: Json) -> Json | None:
    """Return the request for the same answer as a stream that ends with its usage, if a tool call is forced."""
    if body.get("stream") or body.get("tool_choice") in (None, "none", "auto"):
        return None
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def joined_answer(events: bytes) -> Json:
    """Return the whole answer for the events of a chat stream, or its error as `{"error": ...}`."""
    chunks = [_decode(event[len(_DATA) :]) for event in events.split(b"\n\n") if _is_chunk(event)]
    answer = {name: value for chunk in chunks for name, value in chunk.items() if value is not None}
    if "error" in answer:
        return {"error": answer["error"]}
    if _DATA + _DONE not in events:
        return {"error": {"message": "the stream of the frontend has ended early", "code": 503}}
    return {**answer, "object": "chat.completion", "choices": _joined_choices(chunks)}


def _is_chunk(event: bytes) -> bool:
    return event.startswith(_DATA) and not event.startswith(_DATA + _DONE)


def _joined_choices(chunks: list[Json]) -> list[Json]:
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in _objects(chunk.get("choices")):
            _add_choice(choices, part)
    return [choices[index] for index in sorted(choices)]


def _add_choice(choices: dict[int, Json], part: Json) -> None:
    index = cast("int", part.get("index", 0))
    new: Json = {
        "index": index,
        "message": {"role": "assistant", "content": None},
        "finish_reason": None,
        "logprobs": None,
    }
    choice = choices.setdefault(index, new)
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    choice["logprobs"] = _with_logprobs(choice["logprobs"], part.get("logprobs"))
    delta = part.get("delta")
    if isinstance(delta, dict):
        _add_delta(cast("Json", choice["message"]), delta)


def _add_delta(message: Json, delta: Json) -> None:
    for name in _JOINED_TEXTS:
        if text := delta.get(name):
            message[name] = f"{message.get(name) or ''}{text}"
    for part in _objects(delta.get("tool_calls")):
        _add_call(cast("list[Json]", message.setdefault("tool_calls", [])), part)


def _add_call(calls: list[Json], part: Json) -> None:
    """Add a piece of a call; the first piece of each has its id and name."""
    function = cast("Json", part.get("function") or {})
    index = cast("int", part.get("index", 0))
    if index >= len(calls):
        calls.append({"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
    known = cast("Json", calls[min(index, len(calls) - 1)]["function"])
    for name in ("name", "arguments"):
        known[name] = f"{known[name]}{function.get(name) or ''}"


def _with_logprobs(known: object, part: object) -> object:
    if not isinstance(part, dict) or not isinstance(known, dict):
        return known if part is None else part
    content = [*_objects(known.get("content")), *_objects(part.get("content"))]
    return {**known, "content": content}


def _objects(values: object) -> list[Json]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
