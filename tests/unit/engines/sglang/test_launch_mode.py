"""What may be written after `--`, and what the parts of a model need; ports, weights and media on the way in."""

import itertools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from baton.config.engines import SglangOptions
from baton.engines.sglang import compat
from baton.engines.sglang.compat import Dialect, choose_device, supported_version
from baton.engines.sglang.media import media_fields
from baton.engines.sglang.launch_mode import Part, own_flags, refuse_conflicts
from baton.engines.sglang.tcp_ports import free_port, is_free, meeting_host
from baton.engines.sglang.weights import check_directory, check_specs, shapes_in
from baton.errors import ConfigError, InvalidRequest, Unsupported
from baton.protocol.commands import TensorSpec
from baton.protocol.media import MediaFile, MediaHandles

DIALECT = Dialect(version="0.5.23")


@pytest.mark.parametrize(
    ("part", "given", "says"),
    [
        ("prefill", {"disaggregation_mode": "decode"}, "--disaggregation-mode: decode contradicts"),
        ("whole", {"disaggregation_mode": "prefill"}, "role"),
        ("whole", {"skip_tokenizer_init": True}, "--sglang-guided"),
        ("whole", {"incremental_streaming_output": True}, "streamed"),
        ("whole", {"stream_output": True}, "streamed"),
        ("whole", {"served_model_name": "x"}, "--name"),
        ("whole", {"model_path": "x"}, "--model"),
        ("whole", {"is_embedding": True}, "embed"),
        ("whole", {"schedule_low_priority_values_first": True}, "priority"),
        ("whole", {"tokenizer_worker_num": 2}, "tokenize"),
        ("decode", {"dllm_algorithm": "LowConfidence"}, "diffusion"),
        ("whole", {"nnodes": 2}, "--dist-init-addr"),
        ("whole", {"use_ray": True}, "processes"),
    ],
)
def test_d30_what_contradicts_the_worker_is_refused_and_says_what_to_do(
    part: Part, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_conflicts(part, given)


@pytest.mark.parametrize(
    ("part", "given"),
    [
        ("prefill", {"disaggregation_mode": "prefill"}),
        ("whole", {"disaggregation_mode": "null"}),
        ("whole", {"dllm_algorithm": "LowConfidence"}),
        ("whole", {"tp_size": 4, "dp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000"}),
        ("whole", {"page_size": 64, "kv_events_config": "{}", "log_level": "info"}),
    ],
)
def test_what_fits_is_left_alone(part: Part, given: dict[str, Any]) -> None:
    refuse_conflicts(part, given)


def test_a_refusal_names_the_argument_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match="--model: "):
        refuse_conflicts("whole", {"model_path": "x"}, {"model_path": "--model"})


def test_each_part_asks_for_what_it_needs() -> None:
    def flags(part: Part, *given: str, **options: bool) -> tuple[str, ...]:
        return own_flags(part, SglangOptions(**options), Path("/m"), "name", DIALECT, frozenset(given))  # type: ignore[arg-type]

    whole = flags("whole")
    assert whole[:5] == ("--model-path", "/m", "--served-model-name", "name", "--incremental-streaming-output")
    assert ("--page-size", "16") in itertools.pairwise(whole)
    assert "--enable-metrics" in whole
    assert "--skip-tokenizer-init" not in whole
    assert "--page-size" not in flags("whole", "page_size")
    assert "--skip-tokenizer-init" in flags("whole", guided=False)
    assert "--enable-metrics" not in flags("whole", metrics=False)
    assert flags("prefill")[-2:] == ("--disaggregation-mode", "prefill")
    assert flags("embed")[-1] == "--is-embedding"


def test_only_versions_that_are_known_to_work_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda _: "0.5.23+cpu")
    assert supported_version() == "0.5.23+cpu"
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda _: "0.4.0")
    with pytest.raises(ConfigError, match=r"0\.4\.0 is installed.*0\.5\.21, 0\.5\.22, 0\.5\.23"):
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
    assert meeting_host("10.1.1.1", address) == host


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
