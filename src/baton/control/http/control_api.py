"""The control API over HTTP: authorises a request, decodes its command, executes it and replies."""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from baton.control.http.command_table import COMMAND_PATHS, PREFIX, CommandPath
from baton.control.http.connections import ConnectionLimits
from baton.control.http.replies import OK, BadBody, field_of, json_reply, reply_of
from baton.errors import BatonError, InvalidRequest
from baton.ports.control import Control
from baton.protocol.commands import Command, Outcome
from baton.timelines.pages import page_of
from baton.timelines.reports import AboutReply, TimelinesReply

log = logging.getLogger(__name__)


class Controlled(Protocol):
    """The process behind the control API. Called in the event loop."""

    def control(self) -> Control | None:
        """Return what executes commands, None during the start. Raises Unsupported if there never is one."""

    def about(self) -> AboutReply:
        """Return what the process is and does."""

    def timelines(self, after: int, limit: int) -> TimelinesReply:
        """Return the timelines of requests that run, and of those that finished after number `after`."""

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """Count a command: its path, its outcome ("ok" or the code of its error), and its duration."""


class Unauthorized(BatonError):
    """The request has no token, or a wrong one."""

    code = "unauthorized"
    status = 401


class Forbidden(BatonError):
    """The request was sent by a web page, which may act without the operator's knowledge."""

    code = "forbidden"
    status = 403


class Starting(BatonError):
    """The worker is starting and cannot execute commands yet."""

    code = "starting"
    status = 503
    retryable: ClassVar[bool] = True


class TooLarge(InvalidRequest):
    """The body is larger than the command allows."""

    code = "too_large"
    status = 413


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time."""

    code = "body_timeout"
    status = 408


class ControlApi:
    """Everything under `/control/`. Every request must bring the token."""

    def __init__(self, token: str, controlled: Callable[[], Controlled | None], limits: ConnectionLimits) -> None:
        self._token = token.encode()
        self._controlled = controlled
        self._limits = limits
        self._paths: dict[tuple[str, str], CommandPath] = {
            (entry.method, f"{PREFIX}{entry.path}"): entry for entry in COMMAND_PATHS
        }

    def add_to(self, app: web.Application) -> None:
        """Add the commands to `app`."""
        for (method, path), entry in self._paths.items():
            app.router.add_route(method, path, self._handler(entry))

    async def serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reply to a request below `/control/`, for a command that exists or not; log and count it."""
        started = time.monotonic()
        response, outcome, message = await reply_of(request, self._authorized(handler))
        seconds = time.monotonic() - started
        entry = self._paths.get((request.method, request.path))
        command = entry.path if entry is not None else "unknown"
        level = logging.WARNING if outcome != OK else logging.DEBUG if _is_report(entry) else logging.INFO
        result = f"{outcome}: {message}" if message else outcome
        log.log(level, "control: %s from %s in %.3f s: %s", command, request.remote, seconds, result)
        if not _is_report(entry) and (controlled := self._controlled()) is not None:
            controlled.count_command(command, outcome, seconds)
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _authorized(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._authorize(request)
            return await handler(request)

        return handle

    def _authorize(self, request: web.Request) -> None:
        if "Origin" in request.headers:
            raise Forbidden("commands from web pages are refused")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token)
        if not (matches and scheme.lower() == "bearer"):
            raise Unauthorized(
                "commands need the token of this worker (Authorization: Bearer ...); `baton ctl` finds a generated one"
                " if the same user runs it on the same machine"
            )

    def _handler(self, entry: CommandPath) -> Handler:
        if entry.reply is AboutReply:
            return self._about
        if entry.reply is TimelinesReply:
            return self._timelines

        async def handle(request: web.Request) -> web.StreamResponse:
            control = self._control()
            if entry.command is not None:
                command = await read_command(request, entry, entry.command, self._limits)
                return json_reply(await control.execute(command))
            status = control.status()
            if entry.reply is not Outcome:
                return json_reply(status)
            version = status.weight_version
            return json_reply(Outcome(message=f"the weight version is {version}", weight_version=version))

        return handle

    async def _about(self, _: web.Request) -> web.StreamResponse:
        return json_reply(self._started().about())

    async def _timelines(self, request: web.Request) -> web.StreamResponse:
        page = page_of(request.query)
        return json_reply(self._started().timelines(page.after, page.limit))

    def _started(self) -> Controlled:
        controlled = self._controlled()
        if controlled is None:
            raise Starting("this worker is starting")
        return controlled

    def _control(self) -> Control:
        control = self._started().control()
        if control is None:
            raise Starting("this worker is starting")
        return control


def _is_report(entry: CommandPath | None) -> bool:
    """Whether views ask for it all the time."""
    return entry is not None and entry.reply in (AboutReply, TimelinesReply)


async def read_command(
    request: web.Request, entry: CommandPath, kind: type[Command], limits: ConnectionLimits
) -> Command:
    """Return the command of `kind` in the body of `request`; no body counts as an empty object.

    Raises TooLarge, BodyTimeout, InvalidRequest (not JSON) or BadBody (does not fit the command).
    """
    timeout_s = limits.body_timeout_s + entry.body_bytes / limits.min_bytes_per_s
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, entry.body_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s") from None
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise BadBody(f"{entry.path}: {error}", field_of(str(error))) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{entry.path}: {error}") from None


async def _read(request: web.Request, limit: int) -> bytearray:
    too_large = TooLarge(f"the body may have at most {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise too_large
    return body
