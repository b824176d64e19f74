"""The environment that a process gives the runtime before it is imported."""

import os

import pytest

from baton.cli.settings_options import prepare_runtime
from baton.config.settings import Settings


def test_the_environment_of_the_runtime_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, expected in ({}, "0"), ({"RUST_LIB_BACKTRACE": "1"}, "1"):
        monkeypatch.setattr(os, "environ", {"RUST_BACKTRACE": "1", "DYN_LOG": "theirs", **variables})
        prepare_runtime(Settings())
        assert os.environ["RUST_LIB_BACKTRACE"] == expected
        assert os.environ["RUST_BACKTRACE"] == "1"
        assert os.environ["DYN_LOG"] == Settings().runtime.log
