"""The HTTP endpoint of this `baton serve`, as its supervisor calls it."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from baton.config.load import an_api_key
from baton.config.settings import Settings

NO_HEADERS: Mapping[str, str] = {}


class Answer(NamedTuple):
    """The answer to a request; its status is 0 if there was none, and the body the reason."""

    status: int
    body: bytes

    @property
    def problem(self) -> str:
        """The message of an error, with its status."""
        return f"{self.status} {self._message()}".strip() if self.status else self._message()

    def _message(self) -> str:
        try:
            content = json.loads(self.body)
            inner = content.get("error", content)
            return str(inner["message"] if isinstance(inner, dict) else inner)
        except (ValueError, KeyError, AttributeError):
            return " ".join(self.body.decode(errors="replace").split())


class OwnEndpoint:
    """Sends one request per connection, with an API key if there is one. Raises OSError if there is no answer."""

    def __init__(self, settings: Settings) -> None:
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        self._port = settings.port
        self._tls = _own_tls() if settings.tls_certificate else None
        self._headers = {"Host": "localhost", "Content-Type": "application/json"}
        if (key := an_api_key(settings)) is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def __str__(self) -> str:
        return f"{self._host} port {self._port}"

    async def get(self, path: str) -> Answer:
        """Send a GET."""
        return await self._send("GET", path, b"", NO_HEADERS)

    async def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str] = NO_HEADERS) -> Answer:
        """Send `body` as JSON."""
        return await self._send("POST", path, json.dumps(body).encode(), headers)

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            # HTTP/1.0: the answer ends where the connection does.
            lines = [f"{method} {path} HTTP/1.0", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            return _parsed(await reader.read())
        finally:
            writer.close()


def _own_tls() -> ssl.SSLContext:
    """Return the context to reach our own endpoint, whose certificate is for the names that clients use."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionError("the endpoint closed the connection without an answer")
    return Answer(int(words[1]), body)
