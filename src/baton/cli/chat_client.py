"""A client of the OpenAI endpoint for `baton chat`: chat completions as a stream. Blocks."""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import cast
from urllib.parse import urlsplit

import msgspec

Json = dict[str, object]


class ChatFailed(Exception):
    """The endpoint cannot be reached, or has refused or broken off a request."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the answer: text or reasoning; the last one has the reason of the end, or the usage."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Json | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one answer."""

    first_token_s: float | None
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str | None

    def __str__(self) -> str:
        decode_s = self.total_s - (self.first_token_s or 0.0)
        rate = (
            f", {(self.completion_tokens - 1) / decode_s:.1f} tokens/s"
            if self.completion_tokens > 1 and decode_s
            else ""
        )
        first = f"first token after {self.first_token_s:.2f} s, " if self.first_token_s is not None else ""
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.completion_tokens} answer tokens;"
            f" {first}total {self.total_s:.2f} s{rate}; ended by {self.finish_reason or 'Ctrl-C'}"
        )


class ChatClient:
    """One endpoint. `timeout_s` is the longest silence. With `own`, its certificate is that of our own server."""

    def __init__(self, url: str, key: str | None, timeout_s: float, own: bool) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s
        handlers: list[urllib.request.BaseHandler] = []
        if urlsplit(self.url).scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_tls(own)))
        if own:
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def models(self) -> list[str]:
        """Return the names of the served models. Raises ChatFailed."""
        with closing(self._open("/v1/models", None)) as reply:
            try:
                return [str(each["id"]) for each in json.load(reply)["data"]]
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                problem = f"{self.url}/v1/models does not list models ({error!r}): is it an OpenAI endpoint?"
                raise ChatFailed(problem) from None

    def stream(self, body: Json) -> Iterator[Piece]:
        """Send a chat request and yield the answer. Raises ChatFailed. Closing the iterator cancels the request."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with closing(self._open("/v1/chat/completions", {**body, **options})) as reply:
            try:
                yield from _pieces(reply)
            except (OSError, HTTPException, ValueError) as error:
                raise ChatFailed(f"the answer broke off: {error}") from None

    def _open(self, path: str, body: Json | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
            reply: HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
            return reply
        except urllib.error.HTTPError as error:
            with error:
                raise ChatFailed(_message(error.code, error.read())) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ChatFailed(f"cannot reach {self.url} ({reason}): start `baton serve`, or give --url") from None


class Stopwatch:
    """Measures one answer while its pieces arrive."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._pieces = 0
        self._finish: str | None = None
        self._usage: Json = {}

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        if piece.text or piece.reasoning:
            self._pieces += 1
            self._first = self._first or time.monotonic() - self._began
        self._finish = piece.finish_reason or self._finish
        self._usage = piece.usage or self._usage

    def stats(self) -> Stats:
        """Return the figures so far. The tokens of an answer that was stopped are counted by its pieces."""
        details = self._usage.get("prompt_tokens_details") or {}
        return Stats(
            first_token_s=self._first,
            total_s=time.monotonic() - self._began,
            prompt_tokens=_number(self._usage, "prompt_tokens"),
            cached_tokens=_number(cast(Json, details), "cached_tokens"),
            completion_tokens=_number(self._usage, "completion_tokens") or self._pieces,
            finish_reason=self._finish,
        )


def _pieces(lines: Iterator[bytes]) -> Iterator[Piece]:
    for line in lines:
        name, _, data = line.decode(errors="replace").partition(":")
        if name != "data" or data.strip() == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(_inner_message(event))
        yield _piece(event)


def _piece(event: Json) -> Piece:
    choices = cast("list[Json]", event.get("choices") or [{}])
    delta = cast(Json, choices[0].get("delta") or {})
    return Piece(
        text=str(delta.get("content") or ""),
        reasoning=str(delta.get("reasoning_content") or ""),
        finish_reason=cast("str | None", choices[0].get("finish_reason")),
        usage=cast("Json | None", event.get("usage")),
    )


def _number(values: Json, name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0


def _message(status: int, body: bytes) -> str:
    try:
        return _inner_message(json.loads(body))
    except (ValueError, TypeError, AttributeError):
        return f"the server replied with status {status}"


def _inner_message(content: Json) -> str:
    inner = content.get("error")
    return str(inner["message"] if isinstance(inner, dict) and "message" in inner else inner)


def _tls(own: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if own:  # found by the private socket of our own server, whose certificate is for the names that clients use
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
