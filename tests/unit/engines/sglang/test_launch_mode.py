"""Arguments after `--`, the flags of each launch mode, ports, weights and media."""

import itertools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from baton.config.engines import SglangOptions
from baton.engines.sglang import compat
from baton.engines.sglang.compat import Dialect, choose_device, supported_version
from baton.engines.sglang.launch_mode import LaunchMode, own_flags, refuse_conflicts
from baton.engines.sglang.media import media_fields
from baton.engines.sglang.tcp_ports import bootstrap_host, free_port, is_free
from baton.engines.sglang.weights import check_directory, check_specs, shapes_in
from baton.errors import ConfigError, InvalidRequest, Unsupported
from baton.protocol.commands import TensorSpec
from baton.protocol.media import MediaFile, MediaHandles

DIALECT = Dialect(version="0.5.23")
ALONE, PREFILL, DECODE = LaunchMode(), LaunchMode("prefill"), LaunchMode("decode")
ENCODE = LaunchMode(encoding=True)


@pytest.mark.parametrize(
    ("mode", "given", "says"),
    [
        (PREFILL, {"disaggregation_mode": "decode"}, "--disaggregation-mode: it follows"),
        (ALONE, {"disaggregation_mode": "prefill"}, "role"),
        (ALONE, {"skip_tokenizer_init": True}, "--no-sglang-guided"),
        (ALONE, {"incremental_streaming_output": True}, "streamed"),
        (ALONE, {"stream_output": True}, "streamed"),
        (ALONE, {"served_model_name": "x"}, "--name"),
        (ALONE, {"model_path": "x"}, "--model"),
        (ALONE, {"is_embedding": True}, "embed"),
        (ALONE, {"encoder_only": True}, "--role encode"),
        (ALONE, {"language_only": True}, "--media-encoders"),
        (ENCODE, {"tp_size": 2}, "more encode workers"),
        (ALONE, {"schedule_low_priority_values_first": True}, "priority"),
        (ALONE, {"tokenizer_worker_num": 2}, "tokenize"),
        (DECODE, {"dllm_algorithm": "LowConfidence"}, "diffusion"),
        (ALONE, {"dllm_algorithm_config": "x.yaml"}, "--dllm-algorithm-config: .* add that"),
        (ALONE, {"dllm_algorithm": "LowConfidence", "enable_lora": True}, "--enable-lora: .* no adapters"),
        (ALONE, {"dllm_algorithm": "LowConfidence", "lora_paths": ["x"]}, "--lora-paths: .* no adapters"),
        (ALONE, {"dllm_algorithm": "LowConfidence", "pp_size": 2}, "--pp-size: .* no pipeline parallelism"),
        (ALONE, {"dllm_algorithm": "LowConfidence", "enable_mixed_chunk": True}, "separate batches"),
        (ALONE, {"dllm_algorithm": "LowConfidence", "enable_hierarchical_cache": True}, "no hierarchical cache"),
        (ALONE, {"nnodes": 2}, "--dist-init-addr"),
        (ALONE, {"use_ray": True}, "processes"),
    ],
)
def test_d30_conflicting_arguments_are_refused_with_the_setting_to_use(
    mode: LaunchMode, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_conflicts(mode, given)


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        (PREFILL, {"disaggregation_mode": "prefill"}),
        (ALONE, {"disaggregation_mode": "null"}),
        (ALONE, {"dllm_algorithm": "LowConfidence", "dllm_algorithm_config": "x.yaml", "pp_size": 1}),
        (ALONE, {"tp_size": 4, "dp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000"}),
        (ALONE, {"page_size": 64, "kv_events_config": "{}", "log_level": "info"}),
    ],
)
def test_arguments_that_fit_are_accepted(mode: LaunchMode, given: dict[str, Any]) -> None:
    refuse_conflicts(mode, given)


def test_a_refusal_names_the_argument_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match="--model: "):
        refuse_conflicts(ALONE, {"model_path": "x"}, {"model_path": "--model"})


def test_each_mode_has_its_flags() -> None:
    def flags(mode: LaunchMode, *given: str, **options: bool) -> tuple[str, ...]:
        return own_flags(mode, SglangOptions(**options), Path("/m"), "name", DIALECT, frozenset(given))  # type: ignore[arg-type]

    alone = flags(ALONE)
    assert alone[:5] == ("--model-path", "/m", "--served-model-name", "name", "--incremental-streaming-output")
    assert ("--page-size", "16") in itertools.pairwise(alone)
    assert "--enable-metrics" in alone
    assert "--skip-tokenizer-init" not in alone
    assert "--page-size" not in flags(ALONE, "page_size")
    assert "--skip-tokenizer-init" in flags(ALONE, guided=False)
    assert "--enable-metrics" not in flags(ALONE, metrics=False)
    assert ("--max-running-requests", "8") in itertools.pairwise(flags(ALONE, "dllm_algorithm"))
    assert "--max-running-requests" not in flags(ALONE, "dllm_algorithm", "max_running_requests")
    assert "--max-running-requests" not in alone
    assert flags(PREFILL)[-2:] == ("--disaggregation-mode", "prefill")
    assert flags(LaunchMode(embedding=True))[-1] == "--is-embedding"


def test_only_versions_that_are_known_to_work_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda _: "0.5.23+cpu")
    assert supported_version() == "0.5.23+cpu"
    for other in ("0.4.0", "0.5.22", "0.5.24"):
        monkeypatch.setattr(compat.importlib.metadata, "version", lambda _, other=other: other)
        with pytest.raises(ConfigError, match=rf"{other} is installed; Baton works with 0\.5\.23$"):
            supported_version()


@pytest.mark.parametrize("args", [("--device", "cpu"), ("--tp-size", "1", "--device=cpu")])
def test_a_cpu_that_is_asked_for_is_allowed(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    choose_device(("--device", "cuda"))
    assert "SGLANG_USE_CPU_ENGINE" not in compat.os.environ
    choose_device(args)
    assert compat.os.environ["SGLANG_USE_CPU_ENGINE"] == "1"


def test_d28_a_port_that_is_chosen_is_free_and_given_to_nobody_by_chance() -> None:
    port = free_port("127.0.0.1")
    assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        (None, "10.1.1.1"),
        ("127.0.0.1:5000", "127.0.0.1"),
        ("[::1]:5000", "[::1]"),
        ("no.such.host.invalid:5000", "no.such.host.invalid"),
    ],
)
def test_where_other_engines_find_this_one(address: str | None, host: str) -> None:
    assert bootstrap_host("10.1.1.1", address) == host


def test_an_ipv6_host_is_announced_in_brackets() -> None:
    assert bootstrap_host("fd00::1", None) == "[fd00::1]"


def write_header(directory: Path, shapes: dict[str, list[int]], name: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    header = {key: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for key, shape in shapes.items()}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (directory / name).write_bytes(len(text).to_bytes(8, "little") + text)
    return directory


def test_weights_are_compared_by_name_and_shape_before_anything_is_replaced(tmp_path: Path) -> None:
    ours = shapes_in(write_header(tmp_path / "ours", {"a": [2, 3], "b": [4]}))
    assert ours == {"a": (2, 3), "b": (4,)}
    split = write_header(tmp_path / "split", {"a": [2, 3]}, "1.safetensors")
    check_directory(write_header(split, {"b": [4]}, "2.safetensors"), ours)
    for name, shapes, problem in (
        ("other", {"a": [3, 2], "b": [4]}, "shape"),
        ("less", {"a": [2, 3]}, "lacks b"),
        ("more", {"a": [2, 3], "b": [4], "c": [1]}, "c is not"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            check_directory(write_header(tmp_path / name, shapes), ours)
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "x.safetensors").write_bytes(b"\xff" * 40)
    for place in ("rubbish", "nowhere", ""):
        with pytest.raises(InvalidRequest, match="path"):
            check_directory(tmp_path / place, ours)


def test_single_tensors_are_compared_too() -> None:
    ours = {"a": (2, 3)}
    check_specs([TensorSpec(name="a", dtype="float32", shape=(2, 3))], ours)
    for specs in (
        [],
        [TensorSpec(name="a", dtype="float32", shape=(2, 3))] * 2,
        [TensorSpec(name="a", dtype="float32", shape=(3, 2))],
        [TensorSpec(name="z", dtype="float32", shape=(1,))],
    ):
        with pytest.raises(InvalidRequest, match="tensors"):
            check_specs(specs, ours)


def test_media_go_where_their_kind_belongs_in_their_order() -> None:
    files = [MediaFile(modality=kind, data=kind.encode()) for kind in ("image", "video", "image")]
    assert media_fields(files) == {"image_data": [b"image", b"image"], "video_data": [b"video"]}
    with pytest.raises(InvalidRequest, match="smell"):
        media_fields([MediaFile(modality="smell", data=b"")])


def test_sglang_refuses_what_encode_workers_hold() -> None:
    with pytest.raises(Unsupported, match="encoder_result"):
        media_fields([MediaHandles(params={})])
