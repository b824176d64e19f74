"""Every documented command that this machine can run does what its page says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Command, commands, pages
from tests.docs.plans import Plan, block_that_begins, plan_of, reason_not_to_run
from tests.docs.session import Session, matches

pytest.importorskip("torch")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def runnable(page: str) -> list[Command]:
    """Return the commands of a page that are run."""
    plan = plan_of(page)
    return [command for command in commands(page) if reason_not_to_run(plan, command.text) is None]


def prepared(page: str, plan: Plan, directory: Path) -> Session:
    """Return a session with the files of a page."""
    session = Session(directory, {old: new(directory) for old, new in plan.replaced.items()})
    session.use_models()
    session.variables.update(plan.variables)
    (session.work / "examples").symlink_to(ROOT / "examples")
    for name, words in plan.files.items():
        (session.work / name).write_text(block_that_begins(page, words))
    plan.prepare(session.work)
    return session


@pytest.fixture
def session(request: pytest.FixtureRequest, directory: Path) -> Iterator[Session]:
    """Start what the page takes for granted; whatever is left in the end is killed."""
    page = request.node.callspec.params["page"]
    plan = plan_of(page)
    started = prepared(page, plan, directory)
    try:
        if plan.before:
            started.start(Command(page, 0, plan.before))
        yield started
    finally:
        started.kill()


@pytest.mark.parametrize("page", [page for page in pages() if runnable(page)])
def test_commands_of_a_page_do_what_it_says(page: str, session: Session) -> None:
    for command in runnable(page):
        output = session.run(command)
        shown = "\n".join(command.shown).strip() if plan_of(page).compared else ""
        if shown and session.servers and not output:
            session.settle()
            session.expect(session.servers[-1], command.shown)
        elif shown:
            assert matches(output, session.translate(shown)), f"{page}:{command.line} shows {shown}; it is {output}"
    session.settle()
    session.close()
    assert session.leftovers() == []
