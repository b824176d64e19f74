"""Rows of embedding files: of the model's size and type, with the tokens that its prompts have around rows."""

import struct

import pytest

from baton.engine_kit.bfloat16 import to_float32
from baton.errors import InvalidRequest
from baton.handlers.client_rows import rows_of
from baton.ports.engine import MediaInfo, Placeholder
from baton.ports.transfer import EmbeddingShape
from baton.protocol.media import EmbeddingFile

NUMBERS = (1.0, -2.0, 0.5, 0.0, 8.0, 4.0)


def model(dtype: str = "float32", size: int = 3) -> MediaInfo:
    placeholder = Placeholder(token=9, text="<image>", as_text=(1,), before=(7, 6), after=(7,))
    return MediaInfo(shape=EmbeddingShape(model="m", dtype=dtype, size=size), placeholders={"image": placeholder})


def file(modality: str = "image") -> EmbeddingFile:
    data = memoryview(struct.pack("<6f", *NUMBERS))
    return EmbeddingFile(modality=modality, data=data, dtype="float32", rows=2, size=3, grid=((1, 2, 4),), place="here")


def test_rows_take_the_place_of_those_of_an_encoder() -> None:
    rows = rows_of(file(), model())
    assert rows.item.expansion == ((7, 1), (6, 1), (9, 2), (7, 1))
    assert (rows.item.rows, rows.item.grid, rows.item.embed_token) == (2, ((1, 2, 4),), 9)
    assert bytes(rows.data) == bytes(file().data)


@pytest.mark.parametrize(("dtype", "form"), [("bfloat16", None), ("float16", "<6e")])
def test_rows_are_converted_to_the_type_of_the_model(dtype: str, form: str | None) -> None:
    rows = rows_of(file(), model(dtype))
    values = to_float32(bytes(rows.data)).tolist() if form is None else list(struct.unpack(form, rows.data))
    assert values == list(NUMBERS)
    assert rows.item.content_hash == rows_of(file(), model(dtype)).item.content_hash


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="here: rows of 3 numbers; those of this model have 4"):
        rows_of(file(), model(size=4))


def test_rows_of_a_modality_without_a_placeholder_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="here: prompts of this model have no placeholder for video"):
        rows_of(file("video"), model())
