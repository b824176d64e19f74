"""The operator's routes on HTTP: who may give orders, which orders there are, and what came of them."""

import hmac
import logging
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from baton.control.http.bodies import read_verb
from baton.control.http.command_table import PREFIX, ROUTES, Route
from baton.control.http.replies import OK, answer, answered
from baton.errors import BatonError
from baton.ports.control import Control
from baton.protocol.commands import Outcome

log = logging.getLogger(__name__)


class Operated(Protocol):
    """What stands behind the routes. Called in the event loop."""

    def control(self) -> Control | None:
        """Return what takes orders, None before it does. Raises Unsupported if it never will."""

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """Count a call: its verb, how it ended ("ok" or the code of its error), and how long it took."""


class Unauthorized(BatonError):
    """The call did not bring the token."""

    code = "unauthorized"
    status = 401


class Forbidden(BatonError):
    """The call comes from a page in a browser, which acts for whoever has written the page."""

    code = "forbidden"
    status = 403


class Starting(BatonError):
    """There is nothing yet that could take orders."""

    code = "starting"
    status = 503
    retryable: ClassVar[bool] = True


class ControlRoutes:
    """Everything under `/control/`. With a token, every call must bring it; without one, whoever comes is served."""

    def __init__(self, token: str, operated: Callable[[], Operated | None]) -> None:
        self._token = token.encode()
        self._operated = operated
        self._routes: dict[tuple[str, str], Route] = {(r.method, f"{PREFIX}{r.path}"): r for r in ROUTES}

    def add_to(self, app: web.Application) -> None:
        """Put the routes into `app`."""
        for (method, path), route in self._routes.items():
            app.router.add_route(method, path, self._handler(route))

    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a call below `/control/`, to a route that exists or not, and tell log and metrics how it went."""
        started = time.monotonic()
        response, outcome, message = await answered(request, self._admitting(handler))
        seconds = time.monotonic() - started
        route = self._routes.get((request.method, request.path))
        command = route.path if route is not None else "unknown"
        level = logging.INFO if outcome == OK else logging.WARNING
        told = f"{outcome}: {message}" if message else outcome
        log.log(level, "control: %s from %s in %.3f s: %s", command, request.remote, seconds, told)
        if (operated := self._operated()) is not None:
            operated.count_command(command, outcome, seconds)
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _admitting(self, handler: Handler) -> Handler:
        async def admit(request: web.Request) -> web.StreamResponse:
            self._refuse_strangers(request)
            return await handler(request)

        return admit

    def _refuse_strangers(self, request: web.Request) -> None:
        if "Origin" in request.headers:
            raise Forbidden("orders are not taken from web pages")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token)
        if self._token and not (known and scheme.lower() == "bearer"):
            raise Unauthorized("orders need the token of this worker: Authorization: Bearer ...")

    def _handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            control = self._control()
            if route.command is not None:
                return answer(await control.execute(await read_verb(request, route, route.command)))
            status = control.status()
            if route.reply is not Outcome:
                return answer(status)
            version = status.weight_version
            return answer(Outcome(message=f"the weights are called {version}", weight_version=version))

        return handle

    def _control(self) -> Control:
        operated = self._operated()
        control = operated.control() if operated is not None else None
        if control is None:
            raise Starting("this worker is starting")
        return control
