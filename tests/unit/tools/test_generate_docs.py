"""The docs name files and tests that exist, and the generated pages are up to date."""

import re
from pathlib import Path

import pytest

from tools.generate_docs import DOCS, PAGES

ROOT = Path(__file__).parents[3]


def test_every_file_named_on_the_architecture_page_exists() -> None:
    named = re.findall(r"`(src/baton/[\w/.]*)`", (DOCS / "architecture.md").read_text())
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_package_is_on_the_architecture_page() -> None:
    page = (DOCS / "architecture.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src/baton").glob("*/__init__.py")]
    assert [name for name in packages if f"src/baton/{name}" not in page] == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name]()


def test_every_test_named_on_the_differences_page_exists() -> None:
    named = re.findall(r"`(test_d\d\d_\w+)`", (DOCS / "differences.md").read_text())
    written = "\n".join(file.read_text() for file in (DOCS.parent / "tests").rglob("test_*.py"))
    assert len(named) >= 20
    assert [name for name in named if f"def {name}(" not in written] == []
