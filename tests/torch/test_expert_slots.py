"""Slots of experts: any layout can follow any other, and the weights follow it."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from baton.engines.torch.experts.copies import ASIDE, order_copies  # noqa: E402
from baton.experts.placement import Row  # noqa: E402
from tests.torch.sparse_models import SparseModel, rows, sparse_config  # noqa: E402


@st.composite
def layout_rows(draw: st.DrawFn, count: int) -> list[Row]:
    experts = draw(st.integers(1, 6))
    redundant = draw(st.integers(0, 5))
    row = st.lists(st.integers(0, experts - 1), min_size=redundant, max_size=redundant).flatmap(
        lambda more: st.permutations([*range(experts), *more])
    )
    return [list(draw(row)) for _ in range(count)]


@given(layout_rows(2), st.integers(1, 4))
def test_ordered_copies_turn_one_row_into_the_other(pair: list[Row], size: int) -> None:
    current, wanted = pair
    slots, aside = list(current), -9
    copies = order_copies(current, wanted, size)
    for source, target in copies:
        content = aside if source == ASIDE else slots[source]
        if target == ASIDE:
            aside = content
        else:
            slots[target] = content
    assert slots == wanted
    changed = sum(one != other for one, other in zip(current, wanted, strict=True))
    assert sum(target != ASIDE for _, target in copies) == changed


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_sequence_of_layouts_leaves_the_logits_unchanged(data: st.DataObject) -> None:
    redundant, ranks = data.draw(st.sampled_from([(0, 1), (0, 4), (4, 3), (2, 5), (8, 2)]))
    model = SparseModel(sparse_config(), redundant=redundant, ranks=ranks, dynamic=data.draw(st.booleans()))
    decoder, tokens = model.native(1), model.prompt(6)
    before = decoder.forward([rows(tokens)]).clone()
    weights = {name: part.clone() for name, part in model.slots.parts.items()}
    for _ in range(data.draw(st.integers(1, 4))):
        layer = data.draw(st.integers(0, 1))
        more = data.draw(st.lists(st.integers(0, 7), min_size=redundant, max_size=redundant))
        row = list(data.draw(st.permutations([*range(8), *more])))
        model.slots.place(layer, row)
        assert model.slots.layout[layer] == row
        assert torch.equal(decoder.forward([rows(tokens)]), before)
    assert {name: part.tolist() for name, part in model.slots.parts.items()} == {
        name: part.tolist() for name, part in weights.items()
    }
    assert_equal_copies(model)


def assert_equal_copies(model: SparseModel) -> None:
    for number, row in enumerate(model.slots.layout):
        experts = model.weights.layers[number].experts
        assert experts is not None
        for slot, expert in enumerate(row):
            assert torch.equal(experts.gate_up[slot], experts.gate_up[row.index(expert)])
            assert torch.equal(experts.down[slot], experts.down[row.index(expert)])


def test_new_weights_reach_every_copy() -> None:
    model = SparseModel(sparse_config(), redundant=4, ranks=3)
    model.slots.place(1, [0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 0])
    model.fill(seed=2)
    assert_equal_copies(model)
    fresh = SparseModel(sparse_config())
    fresh.fill(seed=2)
    tokens = model.prompt(20)
    assert torch.equal(model.native().forward([rows(tokens)]), fresh.native().forward([rows(tokens)]))


@pytest.mark.parametrize("row", [[0] * 8, list(range(7)), list(range(9)), [*range(7), 8]])
def test_a_row_that_does_not_fit_changes_nothing(row: Row) -> None:
    model = SparseModel(sparse_config())
    with pytest.raises(ValueError, match="8 slots for 8 experts"):
        model.slots.place(0, row)
    assert model.slots.layout == [list(range(8))] * 2
