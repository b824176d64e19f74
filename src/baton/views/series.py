"""Latency and throughput over time, by role and pool: buckets of some seconds, as many as the plots show."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.views.histogram import Histogram
from baton.views.summaries import kv_wait_us, moved_bytes, queue_us
from baton.views.traces import Hop

BUCKET_S = 5
BUCKETS = 181  # a quarter of an hour
MAX_GROUPS = 100
MAX_GAPS = 128
KINDS = ("first_token", "gap", "queue", "kv")
PERCENTILES = (0.5, 0.95)

Json = dict[str, object]


class Group(NamedTuple):
    """Workers of one role and pool; without a router, the pool is ""."""

    role: str
    pool: str


class _Bucket:
    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.tokens = 0.0
        self.bytes = 0
        self.durations = {kind: Histogram() for kind in KINDS}

    def merge(self, other: "_Bucket") -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.tokens += other.tokens
        self.bytes += other.bytes
        for kind, found in other.durations.items():
            self.durations[kind].merge(found)

    def to_json(self, at_s: int) -> Json:
        latencies = {kind: found.percentiles(*PERCENTILES) for kind, found in self.durations.items() if found}
        return {
            "t": at_s,
            "requests": self.requests,
            "failed": self.failed,
            "tokens": round(self.tokens),
            "bytes": self.bytes,
            **latencies,
        }


class Series:
    """The buckets of every group. Hops are added when they have ended, each of their times where it happened."""

    def __init__(self) -> None:
        self._groups: dict[Group, dict[int, _Bucket]] = {}
        self._latest = 0

    def add(self, group: Group, hop: Hop) -> None:
        """Count a hop that has ended."""
        self._latest = max(self._latest, hop.end_us // 1_000_000 // BUCKET_S)
        end = self._bucket(group, hop.end_us)
        if end is None:
            return
        end.requests += 1
        end.failed += hop.state != "completed" and hop.state != "cancelled"
        end.bytes += moved_bytes(hop)
        for kind, at_us, duration_us in _durations(hop):
            if (bucket := self._bucket(group, at_us)) is not None:
                bucket.durations[kind].add(duration_us)

    def add_tokens(self, group: Group, begin_us: int, end_us: int, tokens: int) -> None:
        """Count tokens that were generated evenly from `begin_us` to `end_us`."""
        width_us = BUCKET_S * 1_000_000
        buckets = range(begin_us // width_us, end_us // width_us + 1)
        for number in buckets[-BUCKETS:]:
            if (bucket := self._bucket(group, number * width_us)) is not None:
                bucket.tokens += tokens / len(buckets)

    def to_json(self, now_us: int, merged: int = 1) -> Json:
        """Return all groups with their buckets, of which each `merged` become one."""
        newest = now_us // 1_000_000 // BUCKET_S // merged
        width_s, count = BUCKET_S * merged, BUCKETS // merged
        return {
            "bucket_s": width_s,
            "begin_s": (newest - count + 1) * width_s,
            "end_s": (newest + 1) * width_s,
            "groups": [
                {
                    "role": group.role,
                    "pool": group.pool,
                    "buckets": [
                        bucket.to_json(number * width_s)
                        for number, bucket in sorted(_merged(buckets, merged).items())
                        if number > newest - count
                    ],
                }
                for group, buckets in sorted(self._groups.items())
            ],
        }

    def _bucket(self, group: Group, at_us: int) -> _Bucket | None:
        """Return the bucket of a time; None if it is too old, or if there are too many groups."""
        number = at_us // 1_000_000 // BUCKET_S
        self._latest = max(self._latest, number)
        if number <= self._latest - BUCKETS or (group not in self._groups and len(self._groups) >= MAX_GROUPS):
            return None
        buckets = self._groups.setdefault(group, {})
        if number not in buckets:
            buckets[number] = _Bucket()
            for old in [each for each in buckets if each <= self._latest - BUCKETS]:
                del buckets[old]
        return buckets[number]


def _merged(buckets: Mapping[int, _Bucket], count: int) -> Mapping[int, _Bucket]:
    if count == 1:
        return buckets
    found: dict[int, _Bucket] = {}
    for number, bucket in buckets.items():
        found.setdefault(number // count, _Bucket()).merge(bucket)
    return found


def _durations(hop: Hop) -> Iterator[tuple[str, int, int]]:
    """Yield kind, time and duration of what a hop has waited for."""
    first_token = hop.at("first_token")
    if first_token is not None:
        yield "first_token", hop.started_us + first_token, first_token
        at_us = hop.started_us + first_token
        gaps = hop.report.output_gaps_us
        stride = max(1, len(gaps) // MAX_GAPS)
        for gap_us in gaps[::stride]:
            at_us = min(at_us + gap_us * stride * hop.report.outputs_per_gap, hop.end_us)
            yield "gap", at_us, gap_us
    if (queued := queue_us(hop)) is not None:
        yield "queue", hop.started_us + (hop.at("first_step") or 0), queued
    if (waited := kv_wait_us(hop)) is not None:
        yield "kv", hop.started_us + (hop.at("kv_moved") or 0), waited
