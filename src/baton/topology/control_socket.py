"""The control socket of `baton serve`, in its private directory: other commands of the same user connect to it."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton.topology.control_messages import (
    Done,
    DrainRequest,
    Failed,
    OperationError,
    Progress,
    Reply,
    Request,
    ScaleRequest,
    Status,
    StatusRequest,
)
from baton.topology.operations import Operations

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")


class ControlSocket:
    """Serves one request for each connection. A change continues if its caller disconnects, until `aclose`."""

    def __init__(self, path: Path, operations: Operations) -> None:
        self._path = path
        self._operations = operations
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """The address that clients connect to."""
        return f"unix:{self._path}"

    async def start(self) -> None:
        """Listen. Raises ConfigError if there can be no socket at the path."""
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_LINE_BYTES)
            self._path.chmod(0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot create the socket {self._path} ({error}); set TMPDIR to another, shorter path"
            ) from None

    async def aclose(self) -> None:
        """Stop listening and cancel what runs. Idempotent, and valid before `start`."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS:
                await self._reply(reader, writer)
        except (OSError, TimeoutError):  # the caller is gone
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies: asyncio.Queue[Reply] = asyncio.Queue()
        try:
            request = await _read(reader)
            _refuse_other_users(writer.get_extra_info("socket"))
        except OperationError as error:
            await _send(writer, Failed(code=error.code, message=error.message))
            return
        self._start(self._answer(request, replies.put_nowait))
        while True:
            reply = await replies.get()
            await _send(writer, reply)
            if not isinstance(reply, Progress):
                return

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request, put: Callable[[Reply], None]) -> None:
        try:
            put(await self._carry_out(request, lambda text: put(Progress(message=text))))
        except OperationError as error:
            put(Failed(code=error.code, message=error.message))
        except asyncio.CancelledError:
            put(Failed(code="not_serving", message="`baton serve` stops"))
            raise
        except Exception as error:  # the caller waits for a last reply, whatever happens
            log.exception("a command of another process failed")
            put(Failed(code="internal", message=f"`baton serve` failed: {error!r}; its log has more"))

    async def _carry_out(self, request: Request, report: Callable[[str], None]) -> Status | Done:
        match request:
            case StatusRequest():
                return self._operations.status()
            case ScaleRequest(counts=counts):
                return await self._operations.scale(counts, report)
            case DrainRequest(worker=worker, restart=restart):
                return await self._operations.drain(worker, restart, report)


def _refuse_other_users(connection: socket.socket) -> None:
    """Raise OperationError unless this user or root is at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user not in (0, os.geteuid()):
        raise OperationError("forbidden", "this `baton serve` belongs to another user")


async def _read(reader: asyncio.StreamReader) -> Request:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        request: Request = msgspec.json.decode(line, type=Request)
        return request
    except (ValueError, msgspec.DecodeError) as error:  # ValueError: the line is too long
        raise OperationError("invalid_request", f"not a request: {error}") from None


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(msgspec.json.encode(reply) + b"\n")
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await writer.drain()
