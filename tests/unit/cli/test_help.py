"""Settings are shown in groups, each in one, and the common ones first."""

import pytest
from click.testing import CliRunner

from baton.cli.main import SECTIONS, cli
from baton.config.groups import COMMON, GROUPS, grouped
from baton.config.load import options


def test_every_setting_is_in_one_group() -> None:
    shown = [option.key for _, found in grouped(options()) for option in found]
    assert sorted(shown) == sorted(option.key for option in options()), "add new settings to config/groups.py"


def test_every_named_setting_exists() -> None:
    keys = {option.key for option in options()}
    sections = {f"{key.partition('.')[0]}." for key in keys if "." in key}
    assert {key for group in GROUPS for key in group.keys} <= keys | sections
    assert keys >= COMMON


@pytest.mark.parametrize("command", ["serve", "worker", "frontend", "doctor"])
def test_help_has_examples_and_common_settings_and_help_all_the_rest(command: str) -> None:
    short = CliRunner().invoke(cli, [command, "--help"]).output
    assert "\nExamples:\n" in short
    assert "--help-all" in short
    assert "--flush-interval-ms" not in short
    every = CliRunner().invoke(cli, [command, "--help-all"]).output
    assert "Examples:" in every
    assert len(every) > len(short)
    wanted = [option for option in options() if ("serve" if command == "doctor" else command) in option.commands]
    assert [option.flag for option in wanted if option.kind != "tuple" and option.flag not in every] == []


def test_every_command_can_be_imported_and_has_the_summary_of_its_line() -> None:
    for section in SECTIONS.values():
        for name in section:
            result = CliRunner().invoke(cli, [name, "--help"])
            assert result.exit_code == 0, (name, result.output)
            assert f" {name} " in result.output


def test_help_engine_shows_the_settings_of_a_built_in_engine() -> None:
    result = CliRunner().invoke(cli, ["serve", "--engine", "echo", "--help-engine"])
    assert result.exit_code == 0, result.output
    own = [option.flag for option in options() if option.key.startswith("echo.")]
    assert [flag for flag in own if flag not in result.output] == []
    assert "--torch-" not in result.output
