"""Which workers a `baton serve` starts, and what it says about them."""

import msgspec
import pytest

from baton.config import MAX_PORT, Settings
from baton.errors import ConfigError
from baton.runtimes.dynamo.options import RuntimeOptions
from baton.topology.layout import describe, joining, lay_out


def test_workers_of_one_kind_are_numbered() -> None:
    places = lay_out(Settings(workers=3, system_port=9000), cores=8)
    assert [place.name for place in places] == ["worker-0", "worker-1", "worker-2"]
    assert [place.variables["BATON_SYSTEM_PORT"] for place in places] == ["9000", "9001", "9002"]
    assert all("BATON_ROLE" not in place.variables for place in places)


def test_prefill_workers_come_first_and_ports_count_through() -> None:
    places = lay_out(Settings(prefill=1, decode=2, system_port=9000), cores=8)
    assert [place.name for place in places] == ["prefill-0", "decode-0", "decode-1"]
    assert [place.variables["BATON_ROLE"] for place in places] == ["prefill", "decode", "decode"]
    assert [place.variables["BATON_SYSTEM_PORT"] for place in places] == ["9000", "9001", "9002"]


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        (Settings(workers=1), None),
        (Settings(workers=2), "4"),
        (Settings(prefill=1, decode=2), "2"),
        (Settings(prefill=8, decode=8), "1"),
        (
            msgspec.structs.replace(Settings(workers=2), torch=msgspec.structs.replace(Settings().torch, threads=3)),
            None,
        ),
    ],
)
def test_workers_share_the_cores(settings: Settings, threads: str | None) -> None:
    assert {place.variables.get("BATON_TORCH_THREADS") for place in lay_out(settings, cores=8)} == {threads}


def test_without_a_port_each_worker_finds_its_own() -> None:
    assert "BATON_SYSTEM_PORT" not in lay_out(Settings(), cores=1)[0].variables


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(role="prefill"), "--prefill"),
        (Settings(role="decode"), "baton worker --role decode"),
        (Settings(role="embed", prefill=1, decode=1), "--role embed"),
        (Settings(workers=2, system_port=MAX_PORT), "--system-port"),
    ],
)
def test_what_cannot_be_a_whole_is_refused(settings: Settings, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        lay_out(settings, cores=1)


def test_what_runs_is_said_in_words() -> None:
    assert describe(Settings()) == "1 worker"
    assert describe(Settings(workers=2)) == "2 workers"
    assert describe(Settings(prefill=1, decode=2)) == "1 prefill and 2 decode workers"


def test_the_command_that_adds_a_worker_has_what_is_not_usual() -> None:
    settings = Settings(
        prefill=1, decode=1, model="/models/my model", runtime=RuntimeOptions(directory="/tmp/x"), namespace="mine"
    )
    assert joining(settings) == (
        "baton worker --role decode --model '/models/my model' --namespace mine --runtime-directory /tmp/x"
    )


def test_the_command_that_adds_a_worker_says_what_the_engine_was_told() -> None:
    settings = Settings(engine="sglang", prefill=1, decode=1, engine_args=("--tp-size", "2", "--name", "a b"))
    assert joining(settings) == "baton worker --role decode --engine sglang -- --tp-size 2 --name 'a b'"
