"""Metrics from several sources on one page."""

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.metrics.exposition import TimedScrape, add_labels, join
from baton.testing import run_bounded

HISTOGRAM = """# HELP a_seconds Time
# TYPE a_seconds histogram
a_seconds_bucket{le="1.0"} 1.0
a_seconds_bucket{le="+Inf"} 2.0
a_seconds_count 2.0
a_seconds_sum 3.0
"""
COUNTER = '# HELP b_total Things\n# TYPE b_total counter\nb_total{kind="x y"} 4.0\n'


def test_metrics_of_different_sources_are_joined() -> None:
    assert join([HISTOGRAM, COUNTER]) == HISTOGRAM + COUNTER


def test_the_first_source_of_a_name_wins() -> None:
    other = HISTOGRAM.replace("3.0", "99.0") + "c 1\n"
    text = join([HISTOGRAM, other, COUNTER.replace("4.0", "5.0"), COUNTER])
    assert text == HISTOGRAM + "c 1\n" + COUNTER.replace("4.0", "5.0")
    names = [family.name for family in text_string_to_metric_families(text)]
    assert names == ["a_seconds", "c", "b"]


def test_samples_without_a_declaration_are_metrics_too() -> None:
    assert join(["x 1\nx_total 2\n", "x 3\ny 4\n"]) == "x 1\nx_total 2\ny 4\n"
    assert join(["", "\n\n", "# a remark\nz 1\n"]) == "z 1\n"


def test_a_source_that_hangs_is_scraped_once_for_all_callers() -> None:
    scrapes = 0

    async def body() -> None:
        proceed = asyncio.Event()

        async def scrape() -> str:
            nonlocal scrapes
            scrapes += 1
            await proceed.wait()
            return "x 1\n"

        source = TimedScrape("the source", scrape, 0.05)
        assert await source.text() == ""
        waiting = [asyncio.create_task(source.text()) for _ in range(2)]
        await asyncio.sleep(0)
        proceed.set()
        assert await asyncio.gather(*waiting) == ["x 1\n"] * 2
        assert scrapes == 1
        assert await source.text() == "x 1\n"
        source.close()

    run_bounded(body())


def test_a_source_that_fails_is_empty_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async def scrape() -> str:
            raise OSError("no file")

        assert await TimedScrape("the engine", scrape, 1.0).text() == ""

    with caplog.at_level(logging.WARNING):
        run_bounded(body())
    assert "the metrics of the engine failed" in caplog.text


@pytest.mark.parametrize(
    ("line", "labelled"),
    [
        ("steps_total 3", 'steps_total{a="1",b="x\\"y"} 3'),
        ("steps{} 3 1700", 'steps{a="1",b="x\\"y"} 3 1700'),
        ('sglang:steps{a="own"} 3', 'sglang:steps{a="own",b="x\\"y"} 3'),
        ('steps{c="}, a=\\"",} 3', 'steps{c="}, a=\\"",a="1",b="x\\"y"} 3'),
        ("# HELP steps Steps", "# HELP steps Steps"),
        ("", ""),
    ],
)
def test_labels_are_added_to_samples_that_lack_them(line: str, labelled: str) -> None:
    assert add_labels(line + "\n", {"a": "1", "b": 'x"y'}) == labelled + "\n"
