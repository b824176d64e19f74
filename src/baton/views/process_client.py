"""Requests to the system servers of processes. Every one has a deadline."""

from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from baton.config.settings import is_loopback
from baton.errors import BatonError
from baton.views.deployment import ProcessAddress
from baton.views.reports import About, TimelinePage

READ_TIMEOUT_S = 3.0
COMMAND_TIMEOUT_S = 300.0
MAX_REPLY_BYTES = 32 << 20

T = TypeVar("T")


class ProcessUnreachable(BatonError):
    """The process does not reply, or replies with something else than its report."""

    code = "unreachable"
    status = 502


class CommandReply(msgspec.Struct, frozen=True):
    """The reply of a process to a command: its status and its JSON."""

    status: int
    body: bytes


class ProcessClient:
    """Sends requests to any number of processes, from one event loop, over kept connections."""

    def __init__(self) -> None:
        # The caller bounds the number of requests. System servers close connections that are idle for 20 s.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()

    async def about(self, process: ProcessAddress) -> About:
        """Return what the process is and does. Raises ProcessUnreachable."""
        return await self._read(process, "about", About)

    async def timelines(self, process: ProcessAddress, after: int, limit: int) -> TimelinePage:
        """Return the requests that have ended after that sequence, and those that run. Raises ProcessUnreachable."""
        return await self._read(process, f"timelines?after={after}&limit={limit}", TimelinePage)

    async def execute(self, process: ProcessAddress, command: str, body: bytes) -> CommandReply:
        """Send a command and return the reply, which may be an error. Raises ProcessUnreachable."""
        headers = {**_headers(process), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=COMMAND_TIMEOUT_S)
        try:
            async with self._session.post(
                f"{process.url}/control/{command}",
                data=body,
                headers=headers,
                timeout=timeout,
                ssl=verifies(process.url),
            ) as reply:
                return CommandReply(reply.status, await _body(reply))
        except TimeoutError:
            raise ProcessUnreachable(
                f"{process.name} did not finish {command} within {COMMAND_TIMEOUT_S:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ProcessUnreachable(f"cannot reach {process.name}: {error}") from None

    async def _read(self, process: ProcessAddress, path: str, kind: type[T]) -> T:
        timeout = aiohttp.ClientTimeout(total=READ_TIMEOUT_S)
        try:
            async with self._session.get(
                f"{process.url}/control/{path}", headers=_headers(process), timeout=timeout, ssl=verifies(process.url)
            ) as reply:
                if reply.status != 200:
                    raise ProcessUnreachable(_refusal(process, reply.status))
                return msgspec.json.decode(await _body(reply), type=kind)
        except TimeoutError:
            raise ProcessUnreachable(f"no reply within {READ_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ProcessUnreachable(str(error) or type(error).__name__) from None
        except msgspec.DecodeError as error:
            raise ProcessUnreachable(f"a reply that is no report: {error}") from None


def verifies(url: str) -> bool:
    """Whether the certificate of the server at `url` is verified. On loopback it is for names that clients use."""
    return not is_loopback(urlsplit(url).hostname or "")


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    """Return the whole body. Raises ProcessUnreachable if it is too large."""
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise ProcessUnreachable(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
    return bytes(body)


def _headers(process: ProcessAddress) -> dict[str, str]:
    return {"Authorization": f"Bearer {process.token}"} if process.token else {}


def _refusal(process: ProcessAddress, status: int) -> str:
    if status == 401:
        hint = "another token" if process.token else "a token"
        return f"it needs {hint}: set BATON_CONTROL_TOKEN to its control token"
    return f"it replied with status {status}"
