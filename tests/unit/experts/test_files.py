"""Files about experts: what a recorder writes is read, what SGLang takes is written, and nothing else passes."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.experts.files import read_counts, write_layout
from baton.experts.formats import layout_in, read_content

COUNTS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
LAYOUT = [[0, 1, 2, 1], [2, 1, 0, 0]]


def put(path: Path, content: object) -> Path:
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    return path


def test_a_dump_of_many_passes_is_summed(tmp_path: Path) -> None:
    passes = torch.tensor([COUNTS, COUNTS, [[0] * 3] * 2], dtype=torch.int32)
    dump = {"rank": 0, "logical_count": passes, "average_utilization_rate_over_window": None}
    assert read_counts(put(tmp_path / "dump.pt", dump)) == [[2, 4, 6], [8, 10, 12]]
    assert read_counts(put(tmp_path / "dump.json", {"logical_count": [COUNTS, COUNTS]})) == [[2, 4, 6], [8, 10, 12]]


def test_a_sum_may_be_wider_than_its_counts(tmp_path: Path) -> None:
    most = 2**31 - 1
    dump = {"logical_count": torch.full((2, 1, 1), most, dtype=torch.int32)}
    assert read_counts(put(tmp_path / "dump.pt", dump)) == [[2 * most]]


@pytest.mark.parametrize("name", ["dump.json", "dump.pt"])
def test_counts_without_passes_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    content = torch.tensor(COUNTS) if name.endswith("pt") else COUNTS
    assert read_counts(put(tmp_path / name, {"logical_count": content})) == COUNTS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"records": [], "last_physical_to_logical_map": []}, "per_pass or per_token dump; record again with .*stat"),
        ({"physical_to_logical_map": LAYOUT}, "it is a layout"),
        ({}, "record with `--experts-recorder stat`"),
        ([1], "must hold an object"),
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
def test_a_dump_that_cannot_be_planned_with_is_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_counts(put(tmp_path / "dump.json", content))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.tensor([[1.0, float("nan")]]), "not numbers|must be layers"),
        (torch.tensor([[[1.0, float("inf")]]]), "not numbers|must be layers"),
        (torch.tensor([[[3, -1]], [[0, 1]]]), "negative"),
        (torch.tensor([[3, -1]]), "must be layers"),
        (torch.tensor(3), "must be layers"),
        (torch.zeros(0, 2, 3), "is zero"),
    ],
)
def test_tensors_are_held_to_the_same(tmp_path: Path, tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_counts(put(tmp_path / "dump.pt", {"logical_count": tensor}))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.json: No such file"):
        read_counts(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.pt: No such file"):
        read_counts(tmp_path / "nowhere.pt")
    with pytest.raises(ConfigError, match=r"must end in \.json or \.pt"):
        read_counts(tmp_path / "dump.txt")
    for name, words in (("dump.json", "not valid JSON"), ("dump.pt", "not a file of tensors")):
        for content in (b"", b"\xff\xfe{", b"garbage that is longer than a few bytes", b"PK\x03\x04 cut short"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ConfigError, match=words):
                read_counts(tmp_path / name)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"logical_count": Bomb()}, tmp_path / "dump.pt")
    with pytest.raises(ConfigError, match="not a file of tensors"):
        read_counts(tmp_path / "dump.pt")
    assert not (tmp_path / "ran").exists()


def test_without_torch_a_pt_file_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "dump.pt", {"logical_count": torch.tensor(COUNTS)})
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="needs torch to be read: install"):
        read_counts(path)
    with pytest.raises(ConfigError, match="needs torch to be written: install"):
        write_layout(tmp_path / "layout.pt", LAYOUT)
    write_layout(tmp_path / "layout.json", LAYOUT)


@pytest.mark.parametrize("name", ["layout.json", "layout.pt"])
def test_a_layout_survives_the_round_trip_and_leaves_nothing_beside_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"of a plan before")
    write_layout(path, LAYOUT)
    assert layout_in(read_content(path), path) == LAYOUT
    assert list(tmp_path.iterdir()) == [path]


def test_json_holds_the_map_alone(tmp_path: Path) -> None:
    write_layout(tmp_path / "layout.json", LAYOUT)
    assert json.loads((tmp_path / "layout.json").read_text()) == {"physical_to_logical_map": LAYOUT}


def test_a_layout_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*taken\.json"):
        write_layout(tmp_path / "taken.json", LAYOUT)
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_layout(tmp_path / "nowhere" / "layout.json", LAYOUT)
    with pytest.raises(ConfigError, match=r"must end in \.json or \.pt"):
        write_layout(tmp_path / "layout.yaml", LAYOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"physical_to_logical_map": LAYOUT, "comment": "mine"}, "must hold physical_to_logical_map alone.* comment"),
        ({"physical_to_logical_map": [[0, 2], [0, 1]]}, "no place for expert 1 in layer 0"),
        ({"physical_to_logical_map": [[0, 10**15]]}, "no place for expert 1 in layer 0"),
        ({"physical_to_logical_map": [[0, -1]]}, "must be layers x slots"),
        ({"physical_to_logical_map": [[0, 1.5]]}, "must be layers x slots"),
        ({"physical_to_logical_map": [[0, 1], [0]]}, "2 columns in layer 0 and 1 in layer 1"),
        ({"physical_to_logical_map": []}, "is empty"),
        ({"physical_to_logical_map": [[[0, 1]]]}, "must be layers x slots"),
    ],
)
def test_a_layout_that_sglang_would_fail_on_is_refused(tmp_path: Path, content: object, words: str) -> None:
    path = put(tmp_path / "layout.json", content)
    with pytest.raises(ConfigError, match=words):
        layout_in(read_content(path), path)
