"""What a prefill and a decode worker have in hand, read from their own metrics, and how long it takes to be gone."""

import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import System

PREFILL, DECODE = 0, 1
POLL_S = 0.005

# Each must be 0 on a worker that has nothing to do: the name of the metric and its labels.
HELD: dict[str, tuple[str, dict[str, str]]] = {
    "in_flight": ("baton_requests_in_flight", {}),
    "running": ("baton_engine_running_requests", {}),
    "waiting": ("baton_engine_waiting_requests", {}),
    "used_blocks": ("baton_engine_kv_blocks", {"use": "used"}),
    "offered": ("baton_rooms_open", {"state": "offered"}),
    "claimed": ("baton_rooms_open", {"state": "claimed"}),
}
ENDS = ("done", "cancelled", "expired", "failed")


class Reading:
    """The metrics of one worker at one moment."""

    def __init__(self, system: System, worker: int) -> None:
        _, text = system.system("/metrics", worker)
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.value
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of what has this name and these labels."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def held(self) -> dict[str, float]:
        """What the worker has in hand, without what is 0."""
        counts = {what: self.value(name, **labels) for what, (name, labels) in HELD.items()}
        return {what: count for what, count in counts.items() if count}

    @property
    def rooms(self) -> dict[str, float]:
        """How many rooms have ended, by how."""
        return {end: self.value("baton_rooms_ended_total", outcome=end) for end in ENDS}

    def ended(self, role: str, state: str) -> float:
        """How many requests have ended in `state`."""
        return self.value("baton_requests_total", role=role, state=state)


def held(system: System) -> dict[int, dict[str, float]]:
    """Return what each worker has in hand, without what is 0 and without workers that have nothing."""
    readings = {worker: Reading(system, worker).held for worker in range(system.workers)}
    return {worker: counts for worker, counts in readings.items() if counts}


def rooms(system: System) -> dict[str, float]:
    """Return how many rooms of the prefill worker have ended, by how."""
    return Reading(system, PREFILL).rooms


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, int]:
    """Return what has been added, without what is the same."""
    return {name: int(count - before[name]) for name, count in after.items() if count != before[name]}


def seconds_until(look: Callable[[], bool], within_s: float, what: Callable[[], object]) -> float:
    """Return how long it took until `look` was true; fail when that takes too long, with `what` is the case then."""
    began = time.monotonic()
    while not look():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what()}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def seconds_until_free(system: System, within_s: float) -> float:
    """Return how long it took until no worker has anything in hand; fail with what is left when that takes too long."""
    return seconds_until(lambda: not held(system), within_s, lambda: f"still in hand: {held(system)}")
