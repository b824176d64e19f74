"""Forwarding: a request to the pool that was chosen for it, whole, and its stream back, unchanged."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest
from baton.ports.runtime import Context, Wire
from baton.protocol.lifecycle import State
from baton.request.cancel_scope import CancelScope
from baton.request.tracker import RequestTracker, TrackedRequest
from baton.router.metrics import RouterMetrics
from baton.router.pools import MEASURED, PartRoutes, PoolState, Route
from baton.router.request_view import read_ask

log = logging.getLogger(__name__)

# What would fail the same way anywhere, or is not wanted any more.
FINAL = (InvalidRequest, Cancelled, DeadlineExceeded)


class Forwarder:
    """Serves one part of the plan. `routes` returns the part as the plan has it now."""

    def __init__(self, routes: Callable[[], PartRoutes], tracker: RequestTracker, metrics: RouterMetrics) -> None:
        self._routes = routes
        self._tracker = tracker
        self._metrics = metrics

    async def generate(self, request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
        """Yield what the pool answers. Until its first output another pool may take over.

        Raises the errors of `errors.py`; closing it cancels the request in the pool.
        """
        routes = self._routes()
        ask = read_ask(request, routes.plan.ttft_ms, routes.plan.itl_ms)
        with self._tracker.track(context, ask.point.length) as tracked:
            tracked.lifecycle.advance(State.SUBMITTED)
            route = routes.route(ask)
            onward = _Onward(context, tracked.scope)
            failure: BatonError | None = None
            while (state := self._next(routes.name, route, failure, tracked)) is not None:
                attempt = _Attempt(state, tracked)
                try:
                    async with aclosing(state.client.call(request, parent=onward)) as replies:
                        async for reply in replies:
                            attempt.take(reply)
                            yield reply
                    attempt.check_ended()
                    self._measure(routes.name, state, attempt, route.targets)
                    return
                except BatonError as error:
                    tracked.scope.check()
                    if attempt.begun or isinstance(error, FINAL):
                        raise
                    failure = error
                    self._metrics.retried(routes.name, state.pool.name, error.code)
                finally:
                    attempt.end()
            raise failure or route.refusal()

    def _next(self, part: str, route: Route, failure: BatonError | None, tracked: TrackedRequest) -> PoolState | None:
        """Choose where the request goes now, and say so."""
        before = set(route.skipped)
        state = route.next()
        for other, why in route.skipped.items():
            if other not in before:
                self._metrics.skipped(part, other.pool.name, why)
        if state is None:
            return None
        reason = "retry" if failure else "fallback" if route.skipped else route.choice.reason
        self._metrics.decided(part, state.pool.name, reason)
        log.debug(
            "%s %s goes to %s (%s, cell %s)", tracked.request_id, part, state.pool.name, reason, route.choice.cell
        )
        return state

    def _measure(self, part: str, state: PoolState, attempt: "_Attempt", targets: Mapping[str, float]) -> None:
        for name in MEASURED[part]:
            value = attempt.ttft_ms if name == "ttft_ms" else attempt.itl_ms
            if value is not None:
                state.windows[name].add(value)
                self._metrics.measured(part, state.pool.name, name.removesuffix("_ms"), value, targets.get(name))


class _Attempt:
    """One request in one pool: counted in the pool, and timed."""

    def __init__(self, state: PoolState, tracked: TrackedRequest) -> None:
        self._state = state
        self._tracked = tracked
        self._started = time.perf_counter()
        self._first = 0.0
        self._last = 0.0
        self._first_tokens = 0
        self._tokens = 0
        self.begun = False
        state.in_flight += 1
        state.waiting += 1

    def take(self, reply: Wire) -> None:
        """Look at what goes by. Raises EngineFailed for an error that comes as the first output."""
        self._last = time.perf_counter()
        tokens = reply.get("token_ids")
        count = len(tokens) if isinstance(tokens, list) else 0
        if not self.begun:
            reason = reply.get("finish_reason")
            if isinstance(reason, dict) and "error" in reason:
                raise EngineFailed(str(reason["error"]))
            self._begin(count)
        self._tokens += count

    def _begin(self, tokens: int) -> None:
        self.begun = True
        self._first = self._tracked.first_output_at = self._last
        self._first_tokens = tokens
        self._state.waiting -= 1
        self._tracked.lifecycle.advance(State.STREAMING)

    def check_ended(self) -> None:
        """Raise EngineFailed if nothing came."""
        if not self.begun:
            raise EngineFailed("the pool ended the stream without an answer")

    def end(self) -> None:
        """Count the request out, however it ended."""
        self._state.in_flight -= 1
        if not self.begun:
            self._state.waiting -= 1
        self._tracked.completion_tokens = self._tokens

    @property
    def ttft_ms(self) -> float:
        """From the call to the first output."""
        return (self._first - self._started) * 1000

    @property
    def itl_ms(self) -> float | None:
        """Between two tokens on average, if there was more than the first output."""
        more = self._tokens - self._first_tokens
        return (self._last - self._first) * 1000 / more if more else None


class _Onward:
    """A request on its way on: the caller's context, cancelled by all that ends the request here."""

    def __init__(self, context: Context, scope: CancelScope) -> None:
        self._scope = scope
        self.id = context.id
        self.trace_headers = context.trace_headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `Context.on_cancel`."""
        self._scope.on_fire(lambda _: callback())
