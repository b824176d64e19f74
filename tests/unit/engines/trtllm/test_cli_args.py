"""Arguments after `--`: their syntax, how they merge, and their help text."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.cli_args import engine_help, merged, read_arguments
from baton.errors import ConfigError
from tests.doubles.trtllm import World, make_library

OPTIONS = TrtllmOptions()


def library(version: str = "1.3.0rc22", world: World | None = None) -> Any:
    return make_library(version, world or World(), CollectorRegistry())


@pytest.mark.parametrize(
    ("args", "tree"),
    [
        (("--max_batch_size", "64"), {"max_batch_size": 64}),
        (("--max_batch_size=64",), {"max_batch_size": 64}),
        (("--max-batch-size=64",), {"max_batch_size": 64}),
        (("--a.b.c", "1.5", "--a.b.d=true"), {"a": {"b": {"c": 1.5, "d": True}}}),
        (("--dtype", "bfloat16"), {"dtype": "bfloat16"}),
        (("--pp_partition", "[3, 5]"), {"pp_partition": [3, 5]}),
        (("--seed", "-1"), {"seed": -1}),
        (("--enable_chunked_prefill",), {"enable_chunked_prefill": True}),
        (("--enable_chunked_prefill", "--dtype=auto"), {"enable_chunked_prefill": True, "dtype": "auto"}),
        (("--name=",), {"name": None}),
        (("--override", '{"a": {"b": 1}}'), {"a": {"b": 1}}),
        ((), {}),
    ],
)
def test_arguments_become_a_tree(args: tuple[str, ...], tree: dict[str, Any]) -> None:
    assert read_arguments(args) == tree


def test_flags_win_over_json_and_json_over_yaml_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("kv_cache_config: {dtype: fp8, tokens_per_block: 8, host_cache_size: 1}\nmax_batch_size: 1\n")
    args = (
        "--kv_cache_config.dtype=auto",
        "--override",
        '{"kv_cache_config": {"dtype": "x", "tokens_per_block": 16}}',
        "--config",
        str(file),
    )
    assert read_arguments(args) == {
        "kv_cache_config": {"dtype": "auto", "tokens_per_block": 16, "host_cache_size": 1},
        "max_batch_size": 1,
    }


def test_merging_changes_neither_side() -> None:
    under: dict[str, Any] = {"a": {"b": 1}}
    over: dict[str, Any] = {"a": {"c": 2}}
    assert merged(under, over) == {"a": {"b": 1, "c": 2}}
    assert (under, over) == ({"a": {"b": 1}}, {"a": {"c": 2}})


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("max_batch_size", "64"), "max_batch_size"),
        (("--override",), "--override"),
        (("--config", "--dtype", "auto"), "--config"),
        (("--a..b", "1"), "a..b"),
        (("--x", "[1"), "--x"),
        (("--override", "{"), "--override"),
        (("--override", "[1]"), "--override"),
        (("--config", "no/such/file.yaml"), "no/such/file.yaml"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named(args: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(args)
    assert named in error.value.message


def test_a_config_file_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    for text in ("- 1", "a: [", "3: 4"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.yaml"):
            read_arguments(("--config", str(tmp_path / "bad.yaml")))
    (tmp_path / "empty.yaml").write_text("")
    assert read_arguments(("--config", str(tmp_path / "empty.yaml"))) == {}


def test_help_lists_the_arguments_or_the_reason_why_it_cannot() -> None:
    text = engine_help(OPTIONS, library())
    assert "--kv_cache_config" in text
    assert "--override JSON" in text
    assert "1.3.0rc22" in text
    assert "cannot be listed" in engine_help(OPTIONS)
