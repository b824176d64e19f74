"""Rows that a client has computed, from an embedding file: checked against the model, as an encoder returns rows."""

from baton.engine_kit.bfloat16 import from_float32, to_float32
from baton.engine_kit.content_hash import rows_hash
from baton.errors import InvalidRequest
from baton.ports.engine import EncodedRows, MediaInfo, Placeholder
from baton.protocol.media import EmbeddingFile, EncodedItem


def file_hash(file: EmbeddingFile, model: str) -> str:
    """Return the content hash of the rows. Slow for large files."""
    return rows_hash(model, bytes(file.data), file.modality, "rows", file.dtype)


def rows_of(file: EmbeddingFile, media: MediaInfo) -> EncodedRows:
    """Return the rows of `file`, of the type that the model takes. Slow for large files. Raises InvalidRequest."""
    shape, placeholder = media.shape, media.placeholders.get(file.modality)
    if placeholder is None:
        raise InvalidRequest(f"{file.place}: prompts of this model have no placeholder for {file.modality}")
    if file.size != shape.size:
        raise InvalidRequest(f"{file.place}: rows of {file.size} numbers; those of this model have {shape.size}")
    return EncodedRows(
        item=EncodedItem(
            modality=file.modality,
            content_hash=file_hash(file, shape.model),
            expansion=_expansion(placeholder, file.rows),
            embed_token=placeholder.token,
            rows=file.rows,
            grid=file.grid,
            seconds_per_grid=file.seconds_per_grid,
            timestamps=file.timestamps,
        ),
        dtype=shape.dtype,
        size=shape.size,
        data=_converted(file, shape.dtype),
    )


def _expansion(placeholder: Placeholder, rows: int) -> tuple[tuple[int, int], ...]:
    around = [[(token, 1) for token in tokens] for tokens in (placeholder.before, placeholder.after)]
    return (*around[0], (placeholder.token, rows), *around[1])


def _converted(file: EmbeddingFile, dtype: str) -> memoryview:
    """Return the rows as numbers of type `dtype`. Raises InvalidRequest for types that are not converted."""
    import numpy as np

    if file.dtype == dtype:
        return file.data
    if file.dtype == "bfloat16":
        values = to_float32(bytes(file.data))
    else:
        values = np.frombuffer(file.data, dtype=file.dtype).astype(np.float32)
    match dtype:
        case "bfloat16":
            return memoryview(from_float32(values))
        case "float32" | "float16":
            return memoryview(values.astype(dtype).tobytes())
    raise InvalidRequest(f"{file.place}: this model takes rows of type {dtype}, and the file has {file.dtype}")
