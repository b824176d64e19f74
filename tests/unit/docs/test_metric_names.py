"""Metrics that pages name are in the generated table of docs/metrics.md."""

import re

import pytest

from tests.docs.pages import ROOT, pages

_SUFFIXES = ("_sum", "_count", "_bucket")
_NAME = re.compile(r"\bbaton_[a-z][a-z_]*[a-z]\b")


def declared() -> set[str]:
    """Return the names in the first columns of the table, with those that a histogram adds."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    made = {f"{name}{suffix}" for name, kind in rows if kind == "histogram" for suffix in _SUFFIXES}
    return {name for name, _ in rows} | made


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/metrics.md"])
def test_every_metric_that_a_page_names_exists(page: str) -> None:
    assert sorted(set(_NAME.findall((ROOT / page).read_text())) - declared()) == []
