"""Latency and throughput in buckets of time, bounded in number."""

from typing import Any

from baton.views.histogram import Histogram
from baton.views.series import BUCKET_S, BUCKETS, Group, Series
from tests.unit.views.hops import START_US, hop

GROUP = Group("decode", "fast")


def buckets(series: Series, now_us: int) -> list[dict[str, Any]]:
    return [bucket for group in series.to_json(now_us)["groups"] for bucket in group["buckets"]]  # type: ignore[attr-defined]


def test_percentiles_are_within_a_bin_of_the_durations() -> None:
    durations = Histogram()
    for duration in range(1, 1001):
        durations.add(duration * 100)
    half, most = durations.percentiles(0.5, 0.95) or (0, 0)
    assert abs(half - 50_000) < 50_000 * 0.06
    assert abs(most - 95_000) < 95_000 * 0.06
    assert Histogram().percentiles(0.5) is None


def test_a_hop_is_counted_where_it_ended_and_its_latencies_where_they_were() -> None:
    series = Series()
    events = {"queued": 0, "first_step": 1000, "first_token": 2000}
    series.add(GROUP, hop("decode-0", "decode", events, duration=20_000_000, gaps_us=(500, 500)))
    series.add(GROUP, hop("decode-0", "decode", {}, duration=20_000_000, state="failed", trace="u"))
    first, last = buckets(series, START_US + 20_000_000)
    assert (first["requests"], last["requests"], last["failed"]) == (0, 2, 1)
    assert last["t"] - first["t"] == 20
    assert first["first_token"] is not None
    assert first["queue"] is not None
    assert "first_token" not in last


def test_tokens_are_spread_over_the_time_in_which_they_were_generated() -> None:
    series = Series()
    series.add_tokens(GROUP, START_US, START_US + 3 * BUCKET_S * 1_000_000, 80)
    assert [bucket["tokens"] for bucket in buckets(series, START_US + 30_000_000)] == [20, 20, 20, 20]


def test_buckets_are_merged_for_a_longer_time() -> None:
    series = Series()
    for number in range(6):
        events = {"first_token": 1000 * (number + 1)}
        series.add(GROUP, hop("decode-0", "decode", events, at=number * BUCKET_S * 1_000_000, trace=str(number)))
    merged = series.to_json(START_US + 40_000_000, 3)
    found = merged["groups"][0]["buckets"]  # type: ignore[index]
    assert merged["bucket_s"] == 3 * BUCKET_S
    assert sum(bucket["requests"] for bucket in found) == 6
    assert len(found) <= 3
    assert all(len(bucket["first_token"]) == 2 for bucket in found)


def test_old_buckets_are_dropped() -> None:
    series = Series()
    for number in range(3 * BUCKETS):
        series.add(GROUP, hop("decode-0", "decode", {}, at=number * BUCKET_S * 1_000_000))
    now_us = START_US + 3 * BUCKETS * BUCKET_S * 1_000_000
    assert len(buckets(series, now_us)) <= BUCKETS
    series.add(GROUP, hop("decode-0", "decode", {}, trace="late"))
    assert len(buckets(series, now_us)) <= BUCKETS


def test_the_gaps_of_a_long_answer_are_those_of_single_outputs() -> None:
    series = Series()
    gaps = {"gaps_us": (800,) * 10, "outputs_per_gap": 8}
    series.add(GROUP, hop("decode-0", "decode", {"first_token": 100}, duration=9000, **gaps))  # type: ignore[arg-type]
    [bucket] = buckets(series, START_US)
    assert abs(bucket["gap"][0] - 100) < 100 * 0.06
