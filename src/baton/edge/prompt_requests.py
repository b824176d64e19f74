"""Requests that ask for their own prompt: `echo`, `prompt_logprobs`, `return_token_ids`, `max_tokens` 0.

The frontend drops these fields. Workers return what is asked for as `nvext.engine_data`, of one prompt at a time, so a
request becomes one request to the frontend for each of its prompts. `prompt_answers.py` joins their answers.
"""

from typing import cast

import msgspec

from baton.edge.errors import FieldError
from baton.edge.extra_options import with_options
from baton.edge.routes import Json

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_PROMPTS = 1024

Prompt = str | list[int]

_ASKED_IF_PRESENT = ("prompt_logprobs", "return_token_ids", "truncate_prompt_tokens")
_OWN_FIELDS = frozenset((*_ASKED_IF_PRESENT, "echo", "stream", "stream_options"))


class PromptQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks to know of its prompts, and how its answer is sent."""

    path: str
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    truncate: int | None = None
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False

    @property
    def scores(self) -> int | None:
        """How many alternatives of each token of the prompt are needed; None if it is not scored."""
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(wanted, default=None)


def prompt_query(path: str, body: Json) -> PromptQuery | None:
    """Return what a checked body asks to know of its prompts, None if it is nothing. Raises FieldError."""
    is_completion = path == COMPLETIONS
    if not body.get("echo") and body.get("max_tokens") != 0 and not any(name in body for name in _ASKED_IF_PRESENT):
        return None
    query = PromptQuery(
        path=path,
        echo=is_completion and bool(body.get("echo")),
        logprobs=_count(body, "logprobs") if is_completion else None,
        prompt_logprobs=_count(body, "prompt_logprobs"),
        token_ids=bool(body.get("return_token_ids")),
        truncate=_count(body, "truncate_prompt_tokens"),
        max_tokens=_count(body, "max_tokens" if is_completion else "max_completion_tokens"),
        stream=bool(body.get("stream")),
        include_usage=_include_usage(body.get("stream_options")),
    )
    _check(query, body)
    return query


def prompts_of(body: Json) -> list[Prompt]:
    """Return the prompts of a completion request, each a text or a list of tokens. Raises FieldError."""
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    items = cast("list[str | int | list[int]]", prompt)
    if items and isinstance(items[0], int):
        return [cast("list[int]", items)]
    if len(items) > MAX_PROMPTS:
        raise FieldError("prompt", f"Invalid 'prompt': {len(items)} prompts; at most {MAX_PROMPTS} are accepted.")
    return cast("list[Prompt]", items)


def frontend_body(query: PromptQuery, body: Json, prompt: Prompt | None) -> Json:
    """Return the body for one prompt (None for a chat)."""
    options: Json = {}
    if query.max_tokens is not None:
        options["max_tokens"] = query.max_tokens
    if query.echo:
        options["echo"] = True
    if query.token_ids:
        options["return_token_ids"] = True
    if query.scores is not None:
        options["prompt_logprobs"] = query.scores
    sent = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    if prompt is not None:
        sent["prompt"] = prompt
    if query.max_tokens == 0:
        sent["max_tokens"] = 1
    returned = ("engine_data", "completion_token_ids") if query.token_ids else ("engine_data",)
    return with_options(sent, options, returned)


def tokenizing_body(body: Json, prompt: Prompt) -> Json:
    """Return a body whose answer has the tokens of `prompt` and nothing else."""
    sent: Json = {name: body[name] for name in ("model", "nvext", "cache_salt") if name in body}
    sent |= {"prompt": prompt, "max_tokens": 1}
    return with_options(sent, {"max_tokens": 0, "return_token_ids": True}, ("engine_data",))


def _count(body: Json, name: str) -> int | None:
    value = body.get(name)
    if value is None and name == "max_completion_tokens":
        value = body.get("max_tokens")
    return value if isinstance(value, int) else None


def _include_usage(stream_options: object) -> bool:
    return isinstance(stream_options, dict) and bool(stream_options.get("include_usage"))


def _check(query: PromptQuery, body: Json) -> None:
    """Raise FieldError for combinations that cannot be answered."""
    if query.stream:
        for name, asked in (
            ("prompt_logprobs", query.prompt_logprobs is not None),
            ("return_token_ids", query.token_ids),
        ):
            if asked:
                raise _unsupported(name, "it is not returned in a stream; leave out 'stream'")
    choices = max(int(cast(int, body.get(name) or 1)) for name in ("n", "best_of"))
    if query.token_ids and choices > 1:
        raise _unsupported("return_token_ids", "the tokens of one choice are returned; leave out 'n'")
    if query.truncate is not None:
        _check_truncation(query.truncate, query.path)


def _check_truncation(keep: int, path: str) -> None:
    if keep < 1:
        raise FieldError("truncate_prompt_tokens", "Invalid 'truncate_prompt_tokens': at least one token is kept.")
    if path != COMPLETIONS:
        raise _unsupported("truncate_prompt_tokens", f"prompts are truncated on {COMPLETIONS} only")


def _unsupported(name: str, reason: str) -> FieldError:
    return FieldError(
        name, f"Unsupported parameter: '{name}' is not supported here: {reason}.", code="unsupported_parameter"
    )
