"""The media of one prompt: where its rows are, its rotary positions, and its part in block hashes. Knows no torch.

Everything follows from the items and their places, and nothing from tokens: a client can type any token.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.engine_kit.block_hash import MediaSpan
from baton.engines.torch.models.vision_language import SpatialPositions
from baton.errors import InvalidRequest
from baton.protocol.events import RoutedRows
from baton.protocol.media import Media, MediaEmbedding

Triple = tuple[int, int, int]
RotaryPositions = int | list[Triple]
"""The positions of consecutive tokens: their indexes plus a number, or time, height and width of each."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RowRun(NamedTuple):
    """Tokens [start, start + length) of a prompt, which are rows from `row` on of item `number`."""

    start: int
    length: int
    number: int
    row: int


class _Text(NamedTuple):
    """Tokens from `start` on whose positions are their indexes plus `shift`."""

    start: int
    stop: int
    shift: int

    def positions(self, start: int, stop: int) -> Iterator[Triple]:
        for index in range(start, stop):
            yield (index + self.shift,) * 3


class _Grid(NamedTuple):
    """Tokens [start, stop) of a picture or video whose first row has the position `base` in all directions."""

    start: int
    stop: int
    base: int
    times: tuple[int, ...]
    height: int
    width: int

    @property
    def end(self) -> int:
        """The first position after all of its own."""
        return self.base + max(self.times[-1] + 1, self.height, self.width)

    def positions(self, start: int, stop: int) -> Iterator[Triple]:
        frame = self.height * self.width
        for index in range(start - self.start, stop - self.start):
            time, place = divmod(index, frame)
            row, column = divmod(place, self.width)
            yield self.base + self.times[time], self.base + row, self.base + column


class PromptMedia:
    """The encoded items of one prompt, in the order of their places; shared by all choices of its request.

    `items` keep their rows until the request has ended: a preempted sequence needs them again.
    """

    def __init__(self, items: Sequence[MediaEmbedding], prompt_tokens: int, spatial: SpatialPositions | None) -> None:
        """Raises InvalidRequest for items that overlap, or whose grid does not fit their rows."""
        self.items = tuple(sorted(items, key=lambda item: item.position))
        _refuse_misplaced(self.items, prompt_tokens)
        self.runs = [run for number, item in enumerate(self.items) for run in _row_runs(number, item)]
        self.spans = [
            MediaSpan(one.position, one.position + one.item.prompt_tokens, one.item.content_hash) for one in self.items
        ]
        self.routed = [
            RoutedRows(run.start, run.start + run.length, routing_hash)
            for run in self.runs
            if (routing_hash := self.items[run.number].routing_hash) is not None
        ]
        self._segments = _segments(self.items, spatial) if spatial is not None else [_Text(0, _FOREVER, 0)]

    @property
    def has_rows(self) -> bool:
        """Whether the rows of all items are here."""
        return all(item.data is not None for item in self.items)

    @property
    def rows_end(self) -> int:
        """The index after the last token that is a row."""
        return max((run.start + run.length for run in self.runs), default=0)

    @property
    def largest_shift(self) -> int:
        """By how much the position of a token after the last item is larger than its index."""
        return self._segments[-1].shift if isinstance(self._segments[-1], _Text) else 0

    def rows_in(self, start: int, stop: int) -> Iterator[RowRun]:
        """Yield the parts of runs of rows among tokens [start, stop)."""
        for run in self.runs:
            first, last = max(start, run.start), min(stop, run.start + run.length)
            if first < last:
                yield RowRun(first, last - first, run.number, run.row + first - run.start)

    def positions(self, start: int, stop: int) -> RotaryPositions:
        """Return the rotary positions of tokens [start, stop)."""
        parts = [part for part in self._segments if part.start < stop and part.stop > start]
        match parts:
            case [_Text() as text]:
                return text.shift
            case _:
                return [one for part in parts for one in part.positions(max(start, part.start), min(stop, part.stop))]


_FOREVER = 1 << 62


def read_media(media: Sequence[Media], prompt_tokens: int, spatial: SpatialPositions | None) -> PromptMedia | None:
    """Return the encoded media of a prompt, None if it has none. Raises InvalidRequest."""
    items = [item for item in media if isinstance(item, MediaEmbedding)]
    return PromptMedia(items, prompt_tokens, spatial) if items else None


def check_rows(media: PromptMedia, size: int) -> None:
    """Raise InvalidRequest unless the rows that are here have `size` numbers and are complete."""
    for item in media.items:
        if item.data is None:
            continue
        if item.dtype not in _ITEM_BYTES:
            raise InvalidRequest(f"media: rows of type {item.dtype}; they are {', '.join(_ITEM_BYTES)}")
        nbytes = item.item.rows * size * _ITEM_BYTES[item.dtype]
        if item.size != size or item.data.nbytes != nbytes:
            raise InvalidRequest(
                f"media: {item.item.rows} rows of {item.size} numbers in {item.data.nbytes} bytes; this model takes"
                f" rows of {size} numbers, {nbytes} bytes"
            )


def _refuse_misplaced(items: Sequence[MediaEmbedding], prompt_tokens: int) -> None:
    end = 0
    for item in items:
        if item.position < end or item.position + item.item.prompt_tokens > prompt_tokens:
            raise InvalidRequest(f"media: an item at token {item.position} overlaps another or the end of the prompt")
        end = item.position + item.item.prompt_tokens


def _row_runs(number: int, placed: MediaEmbedding) -> Iterator[RowRun]:
    start, row = placed.position, 0
    for token, count in placed.item.expansion:
        if token == placed.item.embed_token:
            yield RowRun(start, count, number, row)
            row += count
        start += count


def _segments(items: Sequence[MediaEmbedding], spatial: SpatialPositions) -> list[_Text | _Grid]:
    """Divide a prompt into text and grids. After a grid, text continues after the largest position before it."""
    segments: list[_Text | _Grid] = []
    start = shift = 0
    for number, placed in enumerate(items):
        runs = list(_row_runs(number, placed))
        if len(runs) != len(placed.item.grid):
            raise InvalidRequest(f"media: {len(placed.item.grid)} grids for {len(runs)} runs of rows of an item")
        for run, grid in zip(runs, placed.item.grid, strict=True):
            if start < run.start:
                segments.append(_Text(start, run.start, shift))
            part = _grid(placed, run, grid, run.start + shift, spatial)
            segments.append(part)
            start, shift = part.stop, part.end - part.stop
    return [*segments, _Text(start, _FOREVER, shift)]


def _grid(placed: MediaEmbedding, run: RowRun, grid: Triple, base: int, spatial: SpatialPositions) -> _Grid:
    frames, height, width = grid[0], grid[1] // spatial.merge, grid[2] // spatial.merge
    if frames * height * width != run.length or run.length == 0:
        raise InvalidRequest(f"media: a grid of {list(grid)} does not have {run.length} rows")
    times = _times(placed, frames, spatial.tokens_per_second)
    return _Grid(run.start, run.start + run.length, base, times, height, width)


def _times(placed: MediaEmbedding, frames: int, tokens_per_second: float) -> tuple[int, ...]:
    """Return the positions of frames in time. Products are rounded to single precision, as models are trained."""
    if placed.modality != "video":
        return tuple(range(frames))
    seconds = 1.0 if placed.item.seconds_per_grid is None else placed.item.seconds_per_grid
    interval = _single(tokens_per_second * _single(seconds))
    return tuple(int(_single(frame * interval)) for frame in range(frames))


def _single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
