"""The recorder of experts without a model: what it keeps in each mode, its bounds, and its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.torch.experts.counting import PassCounts, SlotCounter
from baton.engines.torch.experts.dump import ModelLayers, write_records
from baton.engines.torch.experts.limits import Mode
from baton.engines.torch.experts.recorder import ExpertRecorder, PassRows
from baton.experts.files import read_counts
from baton.experts.placement import Shape, measure, trivial

SHAPE = Shape(experts=4, redundant=2, ranks=2)
LAYOUT = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]]
LAYERS = ModelLayers(4, [1, 3])
ROWS = PassRows(tokens=[7, 8, 9], positions=[0, 1, 5], extend_lengths=[2, 1], prompts=1)
CHOSEN = torch.tensor([[[0, 1], [4, 2], [0, 3]], [[0, 4], [1, 2], [5, 0]]], dtype=torch.int32)


def counted(chosen: torch.Tensor = CHOSEN) -> PassCounts:
    return SlotCounter(LAYOUT, SHAPE).count(chosen)


def recorder_with(mode: Mode, passes: int, max_passes: int | None = None, max_bytes: int = 1 << 20) -> ExpertRecorder:
    recorder = ExpertRecorder(mode, max_passes, max_bytes)
    recorder.start()
    for number in range(passes):
        if recorder.wants(number):
            recorder.add(number, counted(), CHOSEN, lambda: ROWS)
    return recorder


def dump(recorder: ExpertRecorder, directory: Path) -> dict[str, Any]:
    path = write_records(recorder.records(LAYOUT), LAYERS, directory)
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def test_choices_are_counted_by_slot_expert_and_rank() -> None:
    counts = counted()
    assert counts.slots.tolist() == [[2, 1, 1, 1, 1, 0], [2, 1, 1, 0, 1, 1]]
    assert counts.experts.tolist() == [[3, 1, 1, 1], [0, 1, 1, 4]]
    assert counts.ranks.tolist() == [[4, 2], [4, 2]]
    assert counts.balancedness == pytest.approx(3 / 4)


@given(st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=20))
def test_balancedness_of_a_pass_is_that_of_the_planner(rows: list[list[int]]) -> None:
    shape = Shape(experts=8, ranks=4)
    counts = SlotCounter([trivial(shape)], shape).count(torch.tensor([rows], dtype=torch.int32))
    assert counts.experts.sum() == 2 * len(rows)
    assert counts.balancedness == pytest.approx(measure(counts.experts.tolist(), [trivial(shape)], 4).balancedness)


def test_a_layer_without_load_does_not_count_as_balanced() -> None:
    assert counted(CHOSEN[:, :0]).balancedness == 1.0
    slots = torch.tensor([[[0, 1]], [[0, 5]]], dtype=torch.int32)
    assert counted(slots).balancedness == pytest.approx((0.5 + 1.0) / 2)


def test_stat_writes_counts_of_every_layer_of_the_model(tmp_path: Path) -> None:
    recorder = recorder_with("stat", 3)
    content = dump(recorder, tmp_path)
    assert set(content) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert content["logical_count"].dtype == torch.int32
    one = [[0, 0, 0, 0], [3, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 4]]
    assert content["logical_count"].tolist() == [one, one, one]
    assert content["average_utilization_rate_over_window"] == pytest.approx(0.75)
    (path,) = tmp_path.iterdir()
    assert read_counts(path) == [[3 * count for count in row] for row in one]


def test_stat_approx_counts_one_pass_in_eight(tmp_path: Path) -> None:
    assert len(dump(recorder_with("stat_approx", 20), tmp_path)["logical_count"]) == 3


def test_per_pass_writes_the_slots_of_each_pass_and_the_layout(tmp_path: Path) -> None:
    content = dump(recorder_with("per_pass", 2), tmp_path)
    assert set(content) == {"records", "last_physical_to_logical_map"}
    assert content["last_physical_to_logical_map"].tolist() == [
        [0, 1, 2, 3, 0, 1],
        LAYOUT[0],
        [0, 1, 2, 3, 0, 1],
        LAYOUT[1],
    ]
    for number, record in enumerate(content["records"]):
        assert set(record) == {"forward_pass_id", "rank", "gatherer_key", "global_physical_count"}
        assert (record["forward_pass_id"], record["rank"], record["gatherer_key"]) == (number, 0, "primary")
        assert record["global_physical_count"].tolist() == [[0] * 6, [2, 1, 1, 1, 1, 0], [0] * 6, [2, 1, 1, 0, 1, 1]]


def test_per_token_writes_every_choice(tmp_path: Path) -> None:
    (record,) = dump(recorder_with("per_token", 1), tmp_path)["records"]
    assert record["input_ids"] == ROWS.tokens
    assert record["positions"] == ROWS.positions
    assert record["extend_seq_lens"] == [2, 1]
    assert record["forward_mode"] == 3
    assert record["misc_objects"] == []
    choices = record["topk_ids_of_layer"]
    assert choices.shape == (4, 3, 8)
    assert torch.equal(choices[[1, 3], :, :2], CHOSEN)
    assert (choices[:, :, 2:] == -1).all()
    assert (choices[[0, 2]] == -1).all()


@pytest.mark.parametrize(("lengths", "prompts", "mode"), [([3], 1, 1), ([1, 1, 1], 0, 2), ([2, 1], 1, 3)])
def test_the_mode_of_a_pass_has_sglangs_number(tmp_path: Path, lengths: list[int], prompts: int, mode: int) -> None:
    recorder = ExpertRecorder("per_token", None)
    recorder.start()
    recorder.add(0, counted(), CHOSEN, lambda: ROWS._replace(extend_lengths=lengths, prompts=prompts))
    (record,) = dump(recorder, tmp_path)["records"]
    assert record["forward_mode"] == mode
    assert record["extend_seq_lens"] == (lengths if prompts else None)


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
@given(passes=st.integers(0, 12), max_passes=st.none() | st.integers(1, 6), max_bytes=st.integers(0, 1200))
def test_the_record_is_bounded_and_counts_what_it_drops(
    mode: Mode, passes: int, max_passes: int | None, max_bytes: int
) -> None:
    recorder = recorder_with(mode, passes, max_passes, max_bytes)
    records = recorder.records(LAYOUT)
    assert len(records.passes) + records.dropped == passes
    assert sum(recorded.nbytes for recorded in records.passes) <= max_bytes
    assert max_passes is None or len(records.passes) <= max_passes
    assert [recorded.number for recorded in records.passes] == list(range(records.dropped, passes))


def test_a_record_does_not_change_with_the_engines_buffer() -> None:
    recorder = ExpertRecorder("per_token", None)
    recorder.start()
    buffer = CHOSEN.clone()
    recorder.add(0, counted(buffer), buffer, lambda: ROWS)
    buffer.zero_()
    chosen = recorder.records(LAYOUT).passes[0].chosen
    assert chosen is not None
    assert chosen.tolist() == CHOSEN.tolist()


def test_nothing_is_recorded_before_start_and_after_stop() -> None:
    recorder = ExpertRecorder("stat", None)
    assert not recorder.wants(0)
    recorder.start()
    assert recorder.wants(0)
    recorder.add(0, counted(), CHOSEN, lambda: ROWS)
    recorder.stop()
    assert not recorder.wants(1)
    assert recorder.passes == 1
    recorder.start()
    assert recorder.passes == 0


@given(before=st.integers(0, 6), between=st.integers(0, 6), max_passes=st.integers(1, 6))
def test_passes_recorded_while_a_file_is_written_stay(before: int, between: int, max_passes: int) -> None:
    recorder = recorder_with("stat", before, max_passes)
    written = recorder.records(LAYOUT)
    for number in range(before, before + between):
        recorder.add(number, counted(), CHOSEN, lambda: ROWS)
    recorder.forget(written)
    left = recorder.records(LAYOUT)
    if written.passes:
        assert len(left.passes) == min(between, max_passes)
        assert left.dropped == between - len(left.passes)
    assert all(recorded.number >= before for recorded in left.passes) or not written.passes


def test_a_directory_is_created_and_an_unusable_one_is_an_error(tmp_path: Path) -> None:
    recorder = recorder_with("stat", 1)
    assert write_records(recorder.records(LAYOUT), LAYERS, tmp_path / "new" / "records").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_records(recorder.records(LAYOUT), LAYERS, tmp_path / "file")
