"""Settings: flags over environment over file over defaults, and one clear line for every mistake."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.load import PREFIX, load, options, to_environment
from baton.config.settings import Settings
from baton.errors import ConfigError


def file_with(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    return file


def refusal(flags: dict[str, object], variables: dict[str, str], file: Path | None) -> str:
    """Return the one line that a mistake gets."""
    with pytest.raises(ConfigError) as refused:
        load(flags, variables, file)
    assert "\n" not in refused.value.message
    return refused.value.message


def test_without_anything_the_defaults_hold() -> None:
    assert load({}, {}, None) == Settings()


def test_flags_come_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    file = file_with(tmp_path, "port: 1\nworkers: 2\nname: file\necho:\n  pace_ms: 1\n  blocks: 7\n")
    variables = {"BATON_WORKERS": "3", "BATON_NAME": "environment", "BATON_ECHO_PACE_MS": "2"}
    settings = load({"name": "flag", "port": None}, variables, file)
    assert (settings.name, settings.workers, settings.port) == ("flag", 3, 1)
    assert (settings.echo.pace_ms, settings.echo.blocks) == (2.0, 7)
    assert settings.router == "round-robin"


@pytest.mark.parametrize("text", ["name: a, b,,a", "name: [a, b]", "name: [a, b, a]"])
def test_a_model_may_have_several_names(tmp_path: Path, text: str) -> None:
    settings = load({}, {}, file_with(tmp_path, text))
    assert settings.served_names == ("a", "b")
    assert load({}, to_environment(settings), None) == settings


@pytest.mark.parametrize("text", ["true", "1", "True"])
def test_a_switch_is_read_from_the_environment(text: str) -> None:
    assert load({}, {"BATON_ECHO_FAULTS": text}, None).echo.faults is True


def test_variables_of_others_are_left_alone() -> None:
    assert load({}, {"PATH": "/bin", "BATONS": "3", "DYN_LOG": "info"}, None) == Settings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1", "prot"),
        ("echo: {pace: 1}", "echo.pace"),
        ("runtime: {discover: file}", "runtime.discover"),
        ("1: 2", "1"),
    ],
)
def test_an_unknown_key_in_a_file_is_refused_with_its_name_and_the_file(tmp_path: Path, text: str, named: str) -> None:
    file = file_with(tmp_path, text)
    line = refusal({}, {}, file)
    assert named in line
    assert str(file) in line


def test_an_unknown_variable_is_refused_by_name() -> None:
    assert "BATON_PROT" in refusal({}, {"BATON_PROT": "1"}, None)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": "many"}, "port"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"workers": 0}, "workers"),
        ({"router": "fastest"}, "router"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"drain_timeout_s": -1}, "drain_timeout_s"),
        ({"drain_timeout_s": "1e300"}, "drain_timeout_s"),
        ({"stall_timeout_s": "inf"}, "stall_timeout_s"),
        ({"namespace": "No Spaces"}, "namespace"),
        ({"echo.pace_ms": -1}, "echo.pace_ms"),
        ({"runtime.discovery": "dns"}, "runtime.discovery"),
        ({"log_level": "loud"}, "log_level"),
    ],
)
def test_a_bad_value_is_refused_by_name(flags: dict[str, object], named: str) -> None:
    assert named in refusal(flags, {}, None)


@pytest.mark.parametrize("text", ["a: [", "a: 'b", "\x00", "- a\n- b", "just text", "a: b: c", "\t- x"])
def test_a_file_that_is_no_mapping_of_settings_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = file_with(tmp_path, text)
    assert str(file) in refusal({}, {}, file)


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_bytes(b"\xff\xfe\xfa")
    assert str(file) in refusal({}, {}, file)


@pytest.mark.parametrize("place", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, place: str) -> None:
    assert str(tmp_path / place) in refusal({}, {}, tmp_path / place)


@pytest.mark.parametrize("text", ["", "# nothing here\n", "echo:\n", "echo: {}\n"])
def test_an_empty_file_or_section_sets_nothing(tmp_path: Path, text: str) -> None:
    assert load({}, {}, file_with(tmp_path, text)) == Settings()


def test_a_section_that_is_no_mapping_is_refused_as_that(tmp_path: Path) -> None:
    file = file_with(tmp_path, "echo: 5")
    line = refusal({}, {}, file)
    assert "echo" in line
    assert "unknown" not in line


SECTIONS = {"runtime": Settings().runtime, "echo": Settings().echo}
SETTINGS = st.builds(
    msgspec.structs.replace,
    st.just(Settings()),
    port=st.integers(0, 65535),
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    log_dir=st.sampled_from(["", "-", "~/logs", "/tmp/a b", "null", "1", "true"]),
    request_timeout_s=st.floats(1e-9, 3e7),
    flush_interval_ms=st.floats(0, 1000),
    migrations=st.integers(0, 100),
    echo=st.builds(
        msgspec.structs.replace,
        st.just(SECTIONS["echo"]),
        faults=st.booleans(),
        pace_ms=st.floats(0, 1e6),
        context=st.integers(2, 2**40),
    ),
    runtime=st.builds(
        msgspec.structs.replace,
        st.just(SECTIONS["runtime"]),
        discovery=st.sampled_from(["file", "etcd", "kubernetes"]),
        directory=st.sampled_from(["", "/x", "1"]),
    ),
)


@settings(max_examples=40)
@given(SETTINGS, SETTINGS)
def test_another_process_loads_the_same_settings_whatever_it_inherits(mine: Settings, inherited: Settings) -> None:
    assert load({}, to_environment(mine), None) == mine
    assert load({}, {**to_environment(inherited), **to_environment(mine)}, None) == mine


def test_a_flag_that_repeats_a_default_reaches_another_process_too() -> None:
    inherited = {"BATON_PORT": "9000"}
    settings = load({"port": Settings().port}, inherited, None)
    assert load({}, {**inherited, **to_environment(settings)}, None) == settings


def test_every_setting_has_one_name_in_every_place_and_a_description() -> None:
    table = options()
    for names in ([o.key for o in table], [o.flag for o in table], [o.variable for o in table]):
        assert len(set(names)) == len(names)
    assert all(option.description for option in table)
    assert all(option.variable.startswith(PREFIX) and option.flag.startswith("--") for option in table)
    assert all(option.commands for option in table)


def test_every_default_is_a_legal_value() -> None:
    for option in options():
        load({option.key: option.default}, {}, None)


def test_prefill_and_decode_go_together() -> None:
    assert load({"prefill": 1, "decode": 2}, {}, None).decode == 2
    assert "--decode" in refusal({"prefill": 1}, {}, None)
    assert "--prefill" in refusal({}, {"BATON_DECODE": "1"}, None)


def test_a_certificate_and_its_key_need_each_other() -> None:
    assert "add --tls-key" in refusal({"tls_certificate": "cert.pem"}, {}, None)
    assert "add --tls-certificate" in refusal({}, {"BATON_TLS_KEY": "key.pem"}, None)
    assert load({"tls_certificate": "cert.pem", "tls_key": "key.pem"}, {}, None).tls_key == "key.pem"
    assert "--workers" in refusal({"prefill": 1, "decode": 1, "workers": 2}, {}, None)


@pytest.mark.parametrize("flags", [{"prefill": 1, "decode": 1}, {"role": "prefill"}, {"role": "decode"}])
def test_prefill_and_decode_take_tokens_only(flags: dict[str, object]) -> None:
    assert "--model-input text" in refusal({**flags, "model_input": "text"}, {}, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("engine_args: [--tp-size, 2]", ("--tp-size", "2")),
        ("engine_args: --tp-size 2 --name 'a b'", ("--tp-size", "2", "--name", "a b")),
        ("engine_args: {tp-size: 2, lora: true, none: null}", ("--tp-size", "2", "--lora")),
        ("engine_args: {enable-lora: false}", ("--enable-lora=false",)),
        ("engine_args: {kv: {sizes: [1, 2]}}", ("--kv.sizes", "[1, 2]")),
        ("engine_args: {lora-paths: [a, b]}", ("--lora-paths", "a", "b")),
        ("engine_args: {kv: {fraction: 0.5, deep: {up: true}}}", ("--kv.fraction", "0.5", "--kv.deep.up")),
        ("engine_args: {config: [{a: 1}]}", ("--config", '{"a": 1}')),
        ("engine_args:", ()),
    ],
)
def test_words_for_the_engine_can_stand_in_a_file(content: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(content)
    assert load({}, {}, file).engine_args == words


def test_words_for_the_engine_reach_another_process_unchanged() -> None:
    words = ("--a", "b c", "--quote", "it's", "--json", '{"x": [1, "y"]}', "")
    settings = load({"engine_args": words}, {}, None)
    assert load({}, to_environment(settings), None).engine_args == words


@pytest.mark.parametrize("text", ["'open", '"'])
def test_words_that_cannot_be_split_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="engine_args"):
        load({}, {"BATON_ENGINE_ARGS": text}, None)


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_those_that_exist(name: str) -> None:
    message = refusal({}, {f"BATON_{name.upper()}": "nonsense"}, None)
    assert f"--{name.replace('_', '-')}" in message
    assert "auto, none, " in message
    assert "qwen3" in message


def test_workers_that_take_text_have_no_parsers() -> None:
    assert "--model-input text" in refusal({"model_input": "text", "reasoning_parser": "qwen3"}, {}, None)


def test_a_policy_needs_the_router_that_applies_it() -> None:
    assert "--router kv" in refusal({"router_policy": "policy.yaml"}, {}, None)


@pytest.mark.parametrize("place", ["zone", "zone=", "=a", "zone=a,rack=b"])
def test_the_place_of_a_worker_is_one_domain_and_its_value(place: str) -> None:
    assert "--kv-locality" in refusal({"kv.locality": place}, {}, None)
