"""Expert files: recorder dumps are read, layouts are written, and invalid files are refused."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.experts.files import layout_in, read_content, read_counts, write_layout

COUNTS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
LAYOUT = [[0, 1, 2, 1], [2, 1, 0, 0]]


def save(path: Path, content: object) -> Path:
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    return path


def test_counts_are_summed_over_passes(tmp_path: Path) -> None:
    passes = torch.tensor([COUNTS, COUNTS, [[0] * 3] * 2], dtype=torch.int32)
    dump = {"rank": 0, "logical_count": passes, "average_utilization_rate_over_window": None}
    assert read_counts(save(tmp_path / "dump.pt", dump)) == [[2, 4, 6], [8, 10, 12]]
    assert read_counts(save(tmp_path / "dump.json", {"logical_count": [COUNTS, COUNTS]})) == [[2, 4, 6], [8, 10, 12]]


def test_sum_does_not_overflow_the_type_of_the_counts(tmp_path: Path) -> None:
    largest = 2**31 - 1
    dump = {"logical_count": torch.full((2, 1, 1), largest, dtype=torch.int32)}
    assert read_counts(save(tmp_path / "dump.pt", dump)) == [[2 * largest]]


@pytest.mark.parametrize("name", ["dump.json", "dump.pt"])
def test_counts_without_passes_are_read(tmp_path: Path, name: str) -> None:
    content = torch.tensor(COUNTS) if name.endswith("pt") else COUNTS
    assert read_counts(save(tmp_path / name, {"logical_count": content})) == COUNTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"records": [], "last_physical_to_logical_map": []}, "per_pass or per_token dump; record again with .*stat"),
        ({"physical_to_logical_map": LAYOUT}, "it is a layout"),
        ({}, "record with `--experts-recorder stat`"),
        ([1], "must contain an object"),
        ({"logical_count": []}, "logical_count in .* nothing was recorded"),
        ({"logical_count": [[]]}, "is empty"),
        ({"logical_count": [[1, 2], [3]]}, "2 columns in layer 0 and 1 in layer 1"),
        ({"logical_count": [[[1, 2]], [[1]]]}, "passes of different shapes"),
        ({"logical_count": [[1, -2]]}, "must be layers x experts"),
        ({"logical_count": [[1, "2"]]}, "must be layers x experts"),
        ({"logical_count": [[True, False]]}, "must be layers x experts"),
        ({"logical_count": 7}, "must be layers x experts"),
        ({"logical_count": [[[[1]]]]}, "must be layers x experts"),
        ({"logical_count": [[0, 0]]}, "every count .* is zero"),
    ],
)
def test_invalid_dump_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_counts(save(tmp_path / "dump.json", content))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([[1.0, float("nan")]]), "not numbers|must be layers"),
        (torch.tensor([[[1.0, float("inf")]]]), "not numbers|must be layers"),
        (torch.tensor([[[3, -1]], [[0, 1]]]), "negative"),
        (torch.tensor([[3, -1]]), "must be layers"),
        (torch.tensor(3), "must be layers"),
        (torch.zeros(0, 2, 3), "is zero"),
    ],
)
def test_invalid_tensor_is_refused(tmp_path: Path, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_counts(save(tmp_path / "dump.pt", {"logical_count": tensor}))


def test_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.json: No such file"):
        read_counts(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.pt: No such file"):
        read_counts(tmp_path / "nowhere.pt")
    with pytest.raises(ConfigError, match=r"must end in \.json or \.pt"):
        read_counts(tmp_path / "dump.txt")
    for name, message in (("dump.json", "not valid JSON"), ("dump.pt", "not a torch file")):
        for content in (b"", b"\xff\xfe{", b"garbage that is longer than a few bytes", b"PK\x03\x04 cut short"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ConfigError, match=message):
                read_counts(tmp_path / name)


def test_pickle_with_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"logical_count": Bomb()}, tmp_path / "dump.pt")
    with pytest.raises(ConfigError, match="not a torch file"):
        read_counts(tmp_path / "dump.pt")
    assert not (tmp_path / "ran").exists()


def test_error_without_torch_has_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "dump.pt", {"logical_count": torch.tensor(COUNTS)})
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"reading .*dump\.pt needs torch: install"):
        read_counts(path)
    with pytest.raises(ConfigError, match=r"writing .*layout\.pt needs torch: install"):
        write_layout(tmp_path / "layout.pt", LAYOUT)
    write_layout(tmp_path / "layout.json", LAYOUT)


@pytest.mark.parametrize("name", ["layout.json", "layout.pt"])
def test_written_layout_is_read_back_and_leaves_no_temporary_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"previous layout")
    write_layout(path, LAYOUT)
    assert layout_in(read_content(path), path) == LAYOUT
    assert list(tmp_path.iterdir()) == [path]


def test_json_layout_contains_only_the_map(tmp_path: Path) -> None:
    write_layout(tmp_path / "layout.json", LAYOUT)
    assert json.loads((tmp_path / "layout.json").read_text()) == {"physical_to_logical_map": LAYOUT}


def test_layout_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*taken\.json"):
        write_layout(tmp_path / "taken.json", LAYOUT)
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_layout(tmp_path / "nowhere" / "layout.json", LAYOUT)
    with pytest.raises(ConfigError, match=r"must end in \.json or \.pt"):
        write_layout(tmp_path / "layout.yaml", LAYOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"physical_to_logical_map": LAYOUT, "comment": "mine"}, "must contain only physical_to_logical_map.* comment"),
        ({"physical_to_logical_map": [[0, 2], [0, 1]]}, "no slot for expert 1 in layer 0"),
        ({"physical_to_logical_map": [[0, 10**15]]}, "no slot for expert 1 in layer 0"),
        ({"physical_to_logical_map": [[0, -1]]}, "must be layers x slots"),
        ({"physical_to_logical_map": [[0, 1.5]]}, "must be layers x slots"),
        ({"physical_to_logical_map": [[0, 1], [0]]}, "2 columns in layer 0 and 1 in layer 1"),
        ({"physical_to_logical_map": []}, "is empty"),
        ({"physical_to_logical_map": [[[0, 1]]]}, "must be layers x slots"),
    ],
)
def test_layout_that_sglang_cannot_load_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = save(tmp_path / "layout.json", content)
    with pytest.raises(ConfigError, match=message):
        layout_in(read_content(path), path)
