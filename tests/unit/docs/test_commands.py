"""Every command in the documentation is one that its program accepts, and is run by a test or has a reason why not."""

import re

import pytest

from baton.config.load import options
from tests.docs.pages import (
    ROOT,
    SHELLS,
    blocks,
    commands,
    inline_commands,
    is_complete,
    looks_like_command,
    pages,
)
from tests.docs.parsing import Refused, check, check_mention, simple_commands
from tests.docs.plans import PLANS, block_that_begins, plan_of


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_is_accepted_by_its_program(page: str) -> None:
    for command in commands(page):
        try:
            check(command.text)
        except Refused as error:
            pytest.fail(f"{page}:{command.line}: {error}: {command.text}")


@pytest.mark.parametrize("page", pages())
def test_every_command_in_running_text_names_flags_that_exist(page: str) -> None:
    for command in inline_commands(page):
        try:
            check_mention(command.text)
        except Refused as error:
            pytest.fail(f"{page}:{command.line}: {error}: {command.text}")


@pytest.mark.parametrize("page", pages())
def test_blocks_with_commands_say_that_they_are_for_a_shell(page: str) -> None:
    for block in blocks(page):
        if block.language not in SHELLS:
            assert not any(map(looks_like_command, block.lines)), f"{page}:{block.line}: write ```console or ```sh"


@pytest.mark.parametrize("page", sorted(PLANS))
def test_every_entry_of_a_plan_is_used(page: str) -> None:
    plan = plan_of(page)
    texts = [command.text for command in commands(page)]
    for start in plan.not_run:
        assert any(text.startswith(start) for text in texts), f"{page} has no command {start}"
    for old in plan.replaced:
        assert any(old in text for text in texts), f"no command of {page} has {old}"
    for words in plan.files.values():
        assert block_that_begins(page, words)


def test_no_message_and_no_page_gives_a_value_to_a_switch() -> None:
    switches = "|".join(option.flag for option in options() if option.kind == "bool")
    wrong = re.compile(rf"(?:{switches})[ =](?:true|false)\b")
    files = [*(ROOT / "src" / "baton").rglob("*.py"), *(ROOT / page for page in pages())]
    found = {str(path.relative_to(ROOT)): wrong.findall(path.read_text()) for path in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_messages_name_the_package_as_the_index_does() -> None:
    files = [*(ROOT / "src" / "baton").rglob("*.py"), *(ROOT / page for page in pages())]
    assert [str(path.relative_to(ROOT)) for path in files if re.search(r"(?<![\w-])baton\[\w", path.read_text())] == []


def test_many_commands_are_found() -> None:
    assert sum(len(commands(page)) for page in pages()) > 60
    assert sum(len(inline_commands(page)) for page in pages()) > 60


def test_a_command_goes_on_to_the_end_of_its_quotes_and_its_backslashes() -> None:
    assert not is_complete("curl -d '{")
    assert not is_complete("baton serve \\")
    assert is_complete("baton serve  # it's a comment")


def test_pipes_and_assignments_are_taken_apart() -> None:
    text = "A=1 curl -s http://127.0.0.1:8000/metrics | grep baton && TOKEN=$(cat token)"
    assert simple_commands(text) == [["curl", "-s", "http://127.0.0.1:8000/metrics"], ["grep", "baton"]]


@pytest.mark.parametrize(
    "text",
    [
        "baton sreve",
        "baton serve --no-such-flag",
        "baton serve --router nearest",
        "baton serve --prefill 1",
        "baton ctl 9090 no/such",
        "baton ctl 9090 pause --no-such-field 1",
        "make no-such-target",
        "make serve ARGS='--no-such-flag'",
        "pip install 'baton-serve[nothing]'",
        "python -m tools.nothing",
        "curl http://127.0.0.1:8000/v1/nothing",
        "curl http://127.0.0.1:8000/v1/completions -d '{not json}'",
        """curl http://127.0.0.1:8000/v1/completions -d '{"no_such_field": 1}'""",
        "unknown-program",
    ],
)
def test_wrong_commands_are_found(text: str) -> None:
    with pytest.raises(Refused):
        check(text)


def test_a_mention_may_lack_a_value_and_not_name_what_does_not_exist() -> None:
    check_mention("baton serve --encode")
    with pytest.raises(Refused):
        check_mention("baton serve --encoders 2")
