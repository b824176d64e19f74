"""Forwards a request unchanged to its pool, and the stream of the pool unchanged to the caller."""

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from baton.errors import BatonError, EngineFailed, PeerLost
from baton.ports.runtime import Context, Wire
from baton.request.forwarded_context import ForwardedContext
from baton.request.tracker import RequestTracker, TrackedRequest
from baton.router.metrics import RouterMetrics
from baton.router.plan import PoolRole
from baton.router.pools import MEASURED, PoolState
from baton.router.request_view import view_request
from baton.router.routing_table import RoleRouter, Route

log = logging.getLogger(__name__)


class Forwarder:
    """Serves one role. `router` returns the role's router under the plan in force."""

    def __init__(self, router: Callable[[], RoleRouter], tracker: RequestTracker, metrics: RouterMetrics) -> None:
        self._router = router
        self._tracker = tracker
        self._metrics = metrics

    async def generate(self, request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
        """Yield the replies of the selected pool. A failure before the first output is retried in another pool if it is
        one of the pool: a request that its engine fails would fail in every pool, and harm each.

        Raises the errors of `errors.py`. Closing the generator cancels the request in the pool.
        """
        router = self._router()
        view = view_request(request, router.plan.ttft_ms, router.plan.itl_ms)
        with self._tracker.track(context, view.point.length, str(request.get("model", ""))) as tracked:
            tracked.submitted()
            route = router.route(view)
            pool_context = ForwardedContext(context, tracked)
            failure: BatonError | None = None
            while (state := self._next_pool(router.role, route, failure, tracked)) is not None:
                attempt = _Attempt(state, tracked)
                try:
                    async with aclosing(state.client.call(request, parent=pool_context)) as replies:
                        async for reply in replies:
                            attempt.observe(reply)
                            yield reply
                    attempt.require_reply()
                    self._record_latency(router.role, state, attempt, route.targets)
                    return
                except BatonError as error:
                    tracked.scope.check()
                    if attempt.has_reply or not error.retryable:
                        raise
                    failure = error
                    tracked.timeline.mark("retried", {"pool": state.pool.name, "code": error.code})
                    self._metrics.retried(router.role, state.pool.name, error.code)
                finally:
                    attempt.close()
            raise failure or route.refusal()

    def _next_pool(
        self, role: PoolRole, route: Route, failure: BatonError | None, tracked: TrackedRequest
    ) -> PoolState | None:
        """Select the next pool to try, and record the decision."""
        before = set(route.skipped)
        state = route.next()
        for other, why in route.skipped.items():
            if other not in before:
                self._metrics.skipped(role, other.pool.name, why)
        if state is None:
            return None
        reason = _decision_reason(route, failure)
        self._metrics.decided(role, state.pool.name, reason)
        targets = {
            name: target for name in MEASURED[role] if math.isfinite(target := route.targets.get(name, math.inf))
        }
        tracked.timeline.mark("pool_selected", {"role": role, "pool": state.pool.name, "reason": reason, **targets})
        log.debug(
            "%s %s routed to pool %s (%s, cell %s)",
            tracked.request_id,
            role,
            state.pool.name,
            reason,
            route.choice.cell,
        )
        return state

    def _record_latency(
        self, role: PoolRole, state: PoolState, attempt: "_Attempt", targets: Mapping[str, float]
    ) -> None:
        for name in MEASURED[role]:
            value = attempt.ttft_ms if name == "ttft_ms" else attempt.itl_ms
            if value is not None:
                state.latency[name].add(value)
                self._metrics.measured(role, state.pool.name, name.removesuffix("_ms"), value, targets.get(name))


def _decision_reason(route: Route, failure: BatonError | None) -> str:
    if failure is not None:
        return "retry"
    return "fallback" if route.skipped else route.choice.reason


class _Attempt:
    """One request in one pool: counted in the pool's state, and timed.

    Its first reply may come before its first output: a room that the prefill worker has chosen, with nothing computed.
    """

    def __init__(self, state: PoolState, tracked: TrackedRequest) -> None:
        self._state = state
        self._tracked = tracked
        self._started = time.perf_counter()
        self._first = 0.0
        self._last = 0.0
        self._first_tokens = 0
        self._tokens = 0
        self._has_output = False
        self.has_reply = False
        state.in_flight += 1
        state.waiting += 1

    def observe(self, reply: Wire) -> None:
        """Count and time a reply. Raises EngineFailed if the first one is an error."""
        tokens = reply.get("token_ids")
        count = len(tokens) if isinstance(tokens, list) else 0
        reason = reply.get("finish_reason")
        if not self.has_reply:
            if isinstance(reason, dict) and "error" in reason:
                raise EngineFailed(str(reason["error"]))
            self.has_reply = True
        if not self._has_output and _is_room(reply, count, reason):
            return
        self._last = time.perf_counter()
        if not self._has_output:
            self._start_output(count)
        self._tokens += count
        self._tracked.timeline.output(time.perf_counter_ns())

    def _start_output(self, tokens: int) -> None:
        self._has_output = True
        self._first = self._last
        self._first_tokens = tokens
        self._state.waiting -= 1
        self._tracked.first_output()

    def require_reply(self) -> None:
        """Raise PeerLost if the stream ended without a reply."""
        if not self.has_reply:
            raise PeerLost("the pool ended the stream without output")

    def close(self) -> None:
        """Remove the request from the pool's counts. Called once, however the attempt ends."""
        self._state.in_flight -= 1
        if not self._has_output:
            self._state.waiting -= 1
        self._tracked.completion_tokens = self._tokens

    @property
    def ttft_ms(self) -> float | None:
        """From the call to the first output; None if there was none."""
        return (self._first - self._started) * 1000 if self._has_output else None

    @property
    def itl_ms(self) -> float | None:
        """Average time between tokens; None if all tokens were in the first output."""
        more = self._tokens - self._first_tokens
        return (self._last - self._first) * 1000 / more if more else None


def _is_room(reply: Wire, tokens: int, finish_reason: object) -> bool:
    """Return whether a reply only says where the KV of the request will be."""
    return not tokens and finish_reason is None and reply.get("disaggregated_params") is not None
