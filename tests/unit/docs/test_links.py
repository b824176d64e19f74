"""Links between pages, and to their headings, lead somewhere; so do the names of pages in code and messages."""

import re
import unicodedata

import pytest
import yaml

from tests.docs.pages import ROOT, pages

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)
_PAGE_NAME = re.compile(r"docs/([\w/-]+\.(?:md|json))")


def text_of(page: str) -> str:
    """Return a page without its blocks."""
    return _FENCED.sub("", (ROOT / page).read_text())


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page, as mkdocs makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.+)$", text_of(page), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", heading)).encode("ascii", "ignore").decode()
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found[name] = found.get(name, 0) + 1
    return {name if number == 0 else f"{name}_{number}" for name, count in found.items() for number in range(count)}


@pytest.mark.parametrize("page", pages())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: str) -> None:
    for link in _LINK.findall(text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {link}"
        if anchor:
            name = str(path.resolve().relative_to(ROOT))
            assert anchor in anchors(name), f"{page} links to {link}; {name} has {sorted(anchors(name))}"


def test_pages_that_code_and_messages_name_exist() -> None:
    named = {
        (name, str(path.relative_to(ROOT)))
        for folder in ("src", "tests", "bench", "tools", "scripts", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".yaml", ".yml") and path.is_file()
        for name in _PAGE_NAME.findall(path.read_text(errors="replace"))
    }
    assert len(named) > 10
    assert [each for each in sorted(named) if not (ROOT / "docs" / each[0]).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    def files(entries: object) -> list[str]:
        match entries:
            case str():
                return [entries]
            case list():
                return [name for entry in entries for name in files(entry)]
            case dict():
                return [name for entry in entries.values() for name in files(entry)]
        return []

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [page.removeprefix("docs/") for page in pages() if page.startswith("docs/")]
    results = [f"results/{path.name}" for path in (ROOT / "bench" / "results").glob("*.md")]
    assert sorted(listed) == sorted([*written, *results])
