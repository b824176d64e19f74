"""One request in a line: what the list of requests shows of a trace. Pure functions."""

from statistics import median

import msgspec

from baton.views.reports import Detail
from baton.views.traces import Hop, Trace

FRONTEND = "frontend"
GENERATING = ("decode", "aggregated", "embed", "prefill", "worker")
QUEUED = ("kv_moved", "queued", "submitted")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A request across all processes. Times are in µs; None where they are not known."""

    id: str
    client_id: str | None
    model: str | None
    started_us: int
    duration_us: int
    state: str | None
    error_code: str | None
    error: str | None
    error_process: str | None
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    first_token_us: int | None
    queue_us: int | None
    gap_us: int | None
    gap_max_us: int | None
    kv_bytes: int
    target_ttft_ms: float | None
    target_itl_ms: float | None
    processes: list[str]
    pools: list[str]
    retries: int


def summarize(trace: Trace) -> Summary:
    """Return the summary of a trace."""
    hops = trace.hops
    root, answering = hops[0], answering_hop(hops)
    code, message, process = _cause(hops)
    gaps = answering.report.output_gaps_us or root.report.output_gaps_us
    targets = targets_of(hops)
    return Summary(
        id=trace.id,
        client_id=trace.client_id,
        model=_model(root, answering),
        started_us=min(hop.started_us for hop in hops),
        duration_us=_duration_us(hops),
        state=state_of(hops),
        error_code=code,
        error=message,
        error_process=process,
        prompt_tokens=max(hop.report.prompt_tokens for hop in hops),
        cached_tokens=max((each for hop in hops if (each := hop.report.cached_tokens) is not None), default=None),
        completion_tokens=max(answering.report.completion_tokens, root.report.completion_tokens),
        first_token_us=first_token_us(root, answering),
        queue_us=_queued(hops),
        gap_us=int(median(gaps)) if gaps else None,
        gap_max_us=max(gaps, default=None),
        kv_bytes=sum(map(moved_bytes, hops)),
        target_ttft_ms=targets[0],
        target_itl_ms=targets[1],
        processes=[hop.process for hop in hops],
        pools=[str(detail["pool"]) for detail in _details(hops, "pool_selected") if "pool" in detail],
        retries=len(_details(hops, "retried")),
    )


def _cause(hops: list[Hop]) -> tuple[str | None, str | None, str | None]:
    """Return code, message and process of the first error: later ones report the same, or that it has failed."""
    failed = min((hop for hop in hops if hop.report.error is not None), key=lambda hop: hop.end_us, default=None)
    if failed is None or failed.report.error is None:
        return None, None, None
    return failed.report.error.code, failed.report.error.message, failed.process


def state_of(hops: list[Hop]) -> str | None:
    """Return the state of a request. A frontend knows it; without one, it is that of the answer, after all hops."""
    if hops[0].process_role == FRONTEND:
        return hops[0].state
    return None if any(hop.is_running for hop in hops) else answering_hop(hops).state


def _duration_us(hops: list[Hop]) -> int:
    if hops[0].process_role == FRONTEND and hops[0].report.duration_us:
        return hops[0].report.duration_us
    return max(hop.end_us for hop in hops) - min(hop.started_us for hop in hops)


def _model(root: Hop, answering: Hop) -> str | None:
    return root.report.model or answering.report.model


def _queued(hops: list[Hop]) -> int | None:
    waits = [wait for wait in map(queue_us, hops) if wait is not None]
    return sum(waits) if waits else None


def _details(hops: list[Hop], phase: str) -> list[Detail]:
    return [detail for hop in hops for detail in hop.details(phase)]


def answering_hop(hops: list[Hop]) -> Hop:
    """Return the hop whose tokens the client gets: the last one of the roles that generate last."""
    for role in GENERATING:
        found = [hop for hop in hops if hop.process_role == role]
        if found:
            return found[-1]
    return hops[-1]


def first_token_us(root: Hop, answering: Hop) -> int | None:
    """Return the time from the start of the request to its first token."""
    for hop in (root, answering):
        if (at := hop.at("first_token")) is not None:
            return hop.started_us + at - root.started_us
    return None


def queue_us(hop: Hop) -> int | None:
    """Return how long the request has waited in the engine's queue; None if it has not come to its first step."""
    first_step = hop.at("first_step")
    if first_step is None:
        return None
    # A decode worker does not wait for its engine before it has the KV.
    queued = next((at for at in map(hop.at, QUEUED) if at is not None), None)
    return None if queued is None else max(0, first_step - queued)


def kv_wait_us(hop: Hop) -> int | None:
    """Return how long a decode worker has waited for its KV from the claim on."""
    claimed, moved = hop.at("kv_claimed"), hop.at("kv_moved")
    return None if claimed is None or moved is None else max(0, moved - claimed)


def moved_bytes(hop: Hop) -> int:
    """Return the bytes that the hop has fetched from other workers."""
    return sum(int(number) for detail in hop.details("kv_moved") if isinstance(number := detail.get("bytes"), int))


def targets_of(hops: list[Hop]) -> tuple[float | None, float | None]:
    """Return the latency targets that a router had for the request, in ms: first token, and between tokens."""
    found = _details(hops, "pool_selected")
    return _number(found, "ttft_ms"), _number(found, "itl_ms")


def _number(details: list[Detail], name: str) -> float | None:
    return next((float(value) for detail in details if isinstance(value := detail.get(name), int | float)), None)
