"""Metrics from several sources on one page."""

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.metrics.exposition import TimedScrape, join
from baton.testing import run_bounded

HISTOGRAM = """# HELP a_seconds Time
# TYPE a_seconds histogram
a_seconds_bucket{le="1.0"} 1.0
a_seconds_bucket{le="+Inf"} 2.0
a_seconds_count 2.0
a_seconds_sum 3.0
"""
COUNTER = '# HELP b_total Things\n# TYPE b_total counter\nb_total{kind="x y"} 4.0\n'


def test_different_metrics_stand_side_by_side() -> None:
    assert join([HISTOGRAM, COUNTER]) == HISTOGRAM + COUNTER


def test_the_first_who_has_a_name_keeps_it() -> None:
    other = HISTOGRAM.replace("3.0", "99.0") + "c 1\n"
    text = join([HISTOGRAM, other, COUNTER.replace("4.0", "5.0"), COUNTER])
    assert text == HISTOGRAM + "c 1\n" + COUNTER.replace("4.0", "5.0")
    names = [family.name for family in text_string_to_metric_families(text)]
    assert names == ["a_seconds", "c", "b"]


def test_samples_that_nobody_declared_are_metrics_too() -> None:
    assert join(["x 1\nx_total 2\n", "x 3\ny 4\n"]) == "x 1\nx_total 2\ny 4\n"
    assert join(["", "\n\n", "# a remark\nz 1\n"]) == "z 1\n"


def test_a_source_that_hangs_is_asked_once_and_answers_everybody_later() -> None:
    asked = 0

    async def body() -> None:
        answer = asyncio.Event()

        async def ask() -> str:
            nonlocal asked
            asked += 1
            await answer.wait()
            return "x 1\n"

        source = TimedScrape("it", ask, 0.05)
        assert await source.text() == ""
        waiting = [asyncio.create_task(source.text()) for _ in range(2)]
        await asyncio.sleep(0)
        answer.set()
        assert await asyncio.gather(*waiting) == ["x 1\n"] * 2
        assert asked == 1
        assert await source.text() == "x 1\n"
        source.close()

    run_bounded(body())


def test_a_source_that_fails_says_nothing_but_the_log_does(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async def ask() -> str:
            raise OSError("no file")

        assert await TimedScrape("the engine", ask, 1.0).text() == ""

    with caplog.at_level(logging.WARNING):
        run_bounded(body())
    assert "the engine cannot tell its metrics" in caplog.text
