"""Joins the answers of the frontend to the prompts of one request, with what it asks to know of them."""

from collections.abc import Sequence
from typing import cast

import msgspec

from baton.edge.prompt_requests import CHAT, Prompt, PromptQuery
from baton.edge.routes import Json
from baton.errors import EngineFailed

_INTERNAL = ("engine_data", "completion_token_ids")


class PromptData(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker returns of a prompt: see `PromptData` in `baton.protocol.outputs`."""

    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    prompt_tokens: list[str] = []
    prompt_offsets: list[int] = []
    prompt_logprobs: list[dict[str, Json] | None] | None = None


def token_ids_of(answer: Json) -> list[int]:
    """Return the tokens of the prompt. Raises EngineFailed if the answer does not have them."""
    token_ids = _data(answer).prompt_token_ids
    if token_ids is None:
        raise EngineFailed("the worker did not return the tokens of the prompt")
    return token_ids


def joined_answer(
    query: PromptQuery, prompts: Sequence[Prompt], answers: Sequence[Json], requested: Sequence[str]
) -> Json:
    """Return one answer from those to `prompts`. `requested` are the fields that the client wants in `nvext`.

    Raises EngineFailed if a worker did not return what it was asked for.
    """
    first = answers[0]
    if query.path == CHAT:
        return _without_internal(_chat_answer(query, first), requested)
    choices: list[Json] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        data = _data(answer)
        start = len(choices)
        for choice in _choices(answer):
            index = start + cast(int, choice.get("index") or 0)
            choices.append({**_completed(query, choice, prompt, data), **_token_ids(query, answer), "index": index})
    joined = {
        **first,
        "choices": sorted(choices, key=lambda choice: cast(int, choice["index"])),
        "usage": _usage(answers),
    }
    return _without_internal(joined, requested)


def events(query: PromptQuery, answer: Json) -> bytes:
    """Return a completion as the events of a stream: one for each choice, and the usage if it was asked for."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    if query.include_usage:
        head["usage"] = None
    chunks = [{**head, "choices": [choice]} for choice in _choices(answer)]
    if query.include_usage:
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


def _chat_answer(query: PromptQuery, answer: Json) -> Json:
    """vLLM's format: what belongs to the prompt is next to the choices."""
    data = _data(answer)
    about: Json = {}
    if query.prompt_logprobs is not None:
        about["prompt_logprobs"] = _scores(data)
    if not query.token_ids:
        return {**answer, **about}
    about["prompt_token_ids"] = token_ids_of(answer)
    choices = [{**choice, "token_ids": _completion_tokens(answer)} for choice in _choices(answer)]
    return {**answer, **about, "choices": choices}


def _completed(query: PromptQuery, choice: Json, prompt: Prompt, data: PromptData) -> Json:
    """Return a choice with the prompt before it, and the log-probabilities of the prompt."""
    added: Json = {}
    if query.prompt_logprobs is not None:
        added["prompt_logprobs"] = _scores(data)
    if not query.echo:
        return {**choice, **added}
    text = _echoed_text(prompt, data)
    added["text"] = text + str(choice.get("text") or "")
    if query.logprobs is not None:
        added["logprobs"] = _echoed_logprobs(query.logprobs, text, data, choice.get("logprobs"))
    return {**choice, **added}


def _echoed_text(prompt: Prompt, data: PromptData) -> str:
    if isinstance(prompt, str):
        return prompt
    if data.prompt_text is None:
        raise EngineFailed("the worker did not return the text of the prompt")
    return data.prompt_text


def _echoed_logprobs(alternatives: int, text: str, data: PromptData, given: object) -> Json:
    """Return the log-probabilities of the prompt and of the text after it, in OpenAI's format."""
    after = given if isinstance(given, dict) else {}
    scores, tokens = _scores(data), cast("list[str]", after.get("tokens") or [])
    # Tokens that the tokenizer adds in front are not part of the client's text.
    decoded = data.prompt_text or ""
    ahead = len(decoded) - len(text) if decoded.endswith(text) else 0
    return {
        "tokens": [*data.prompt_tokens, *tokens],
        "token_logprobs": [*_chosen(data, scores), *cast("list[float]", after.get("token_logprobs") or [])],
        "top_logprobs": [*_top(data, scores, alternatives), *cast("list[object]", after.get("top_logprobs") or [])],
        "text_offset": [*(max(0, offset - ahead) for offset in data.prompt_offsets), *_offsets(tokens, len(text))],
    }


def _chosen(data: PromptData, scores: Sequence[dict[str, Json] | None]) -> list[object]:
    tokens = data.prompt_token_ids or ()
    return [entry and entry[str(token)]["logprob"] for token, entry in zip(tokens, scores, strict=True)]


def _top(data: PromptData, scores: Sequence[dict[str, Json] | None], alternatives: int) -> list[object]:
    """Return for each token the texts and log-probabilities of itself and of the best alternatives."""
    found: list[object] = []
    for token, entry in zip(data.prompt_token_ids or (), scores, strict=True):
        if entry is None:
            found.append(None)
            continue
        own = entry[str(token)]
        best = {str(own["decoded_token"]): own["logprob"]}
        for other in entry.values():
            rank = other.get("rank")
            if isinstance(rank, int) and rank <= alternatives:
                best.setdefault(str(other["decoded_token"]), other["logprob"])
        found.append(best)
    return found


def _offsets(tokens: Sequence[str], start: int) -> list[int]:
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return offsets


def _scores(data: PromptData) -> list[dict[str, Json] | None]:
    if data.prompt_logprobs is None:
        raise EngineFailed("the worker did not return the log-probabilities of the prompt")
    return data.prompt_logprobs


def _token_ids(query: PromptQuery, answer: Json) -> Json:
    if not query.token_ids:
        return {}
    return {"prompt_token_ids": token_ids_of(answer), "token_ids": _completion_tokens(answer)}


def _completion_tokens(answer: Json) -> object:
    return _extensions(answer).get("completion_token_ids") or []


def _usage(answers: Sequence[Json]) -> Json:
    """Return the sum of the token counts."""
    usages = [cast(Json, answer.get("usage") or {}) for answer in answers]
    total: Json = {name: _sum(usages, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    details = [details for usage in usages if isinstance(details := usage.get("prompt_tokens_details"), dict)]
    return {**total, "prompt_tokens_details": {"cached_tokens": _sum(details, "cached_tokens")}} if details else total


def _sum(counts: Sequence[Json], name: str) -> int:
    return sum(cast(int, each.get(name) or 0) for each in counts)


def _choices(answer: Json) -> list[Json]:
    return cast("list[Json]", answer.get("choices") or [])


def _extensions(answer: Json) -> Json:
    extensions = answer.get("nvext")
    return extensions if isinstance(extensions, dict) else {}


def _data(answer: Json) -> PromptData:
    try:
        return msgspec.convert(_extensions(answer).get("engine_data") or {}, PromptData)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"the worker returned an invalid prompt: {error}") from None


def _without_internal(answer: Json, requested: Sequence[str]) -> Json:
    """Return the answer without the extensions that the client did not ask for."""
    kept = {name: value for name, value in _extensions(answer).items() if name not in _INTERNAL or name in requested}
    rest = {name: value for name, value in answer.items() if name != "nvext"}
    return {**rest, "nvext": kept} if kept else rest
