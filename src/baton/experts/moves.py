"""From one layout row to another with the fewest experts moved. Knows nothing about load."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
Content = list[int]
"""The experts of one rank."""


def moved(row: Sequence[int], current: Sequence[int]) -> int:
    """Return the number of slots that get another expert."""
    return sum(new != old for new, old in zip(row, current, strict=True))


def keep_in_place(row: Sequence[int], current: Sequence[int], ranks: int, nodes: int = 1) -> list[int]:
    """Return `row` with nodes, ranks of a node and slots of a rank exchanged, so that the fewest slots change.

    Experts that share a rank or a node in `row` still do, so the balance stays the same.
    """
    size, per_node = len(row) // ranks, ranks // nodes
    new, old = _chunks(_chunks(row, size), per_node), _chunks(_chunks(current, size), per_node)
    seats = [[_seat(contents, places) for places in old] for contents in new]
    homes = assign([[kept for kept, _ in line] for line in seats])
    result: list[int] = []
    for there, here in enumerate(_inverse(homes)):
        _, places = seats[here][there]
        for place, rank in enumerate(_inverse(places)):
            result += _arrange(new[here][rank], old[there][place])
    return result


def _seat(new: Sequence[Content], old: Sequence[Content]) -> tuple[int, list[int]]:
    """Return how many experts keep their rank if the new contents go to the best old ranks, and these ranks."""
    sets = [_numbered(content) for content in old]
    kept = [[len(content & other) for other in sets] for content in map(_numbered, new)]
    places = assign(kept)
    return sum(line[place] for line, place in zip(kept, places, strict=True)), places


def _numbered(content: Content) -> set[tuple[int, int]]:
    """Return the content as a set in which the copies of an expert differ by a number."""
    seen: Counter[int] = Counter()
    numbered = set()
    for expert in content:
        numbered.add((expert, seen[expert]))
        seen[expert] += 1
    return numbered


def _arrange(content: Content, old: Content) -> Content:
    """Return the content in an order in which every expert that was in the rank keeps its slot."""
    left = Counter(content)
    kept: list[int | None] = []
    for expert in old:
        kept.append(expert if left[expert] else None)
        left[expert] -= left[expert] > 0
    rest = iter(sorted(left.elements()))
    return [next(rest) if expert is None else expert for expert in kept]


def _chunks(items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _inverse(places: Sequence[int]) -> list[int]:
    return sorted(range(len(places)), key=places.__getitem__)


def assign(gains: Sequence[Sequence[int]]) -> list[int]:
    """Return a column for each row of a square matrix, each column once, with the largest sum of gains."""
    matching = _Matching(gains)
    for row in range(len(gains)):
        matching.add(row)
    return matching.columns


class _Matching:
    """The Hungarian algorithm: rows are added one by one, each along the shortest augmenting path.

    Prices keep the length of each cell (price of its row + price of its column - gain) at 0 or above, and at 0 where a
    row is matched.
    """

    def __init__(self, gains: Sequence[Sequence[int]]) -> None:
        self.columns = [-1] * len(gains)
        self._rows = [-1] * len(gains)
        self._gains = gains
        self._row_prices: list[float] = [max(line) for line in gains]
        self._column_prices = [0.0] * len(gains)

    def add(self, start: int) -> None:
        """Match one more row."""
        distances, before = [math.inf] * len(self._rows), [start] * len(self._rows)
        left, passed = set(range(len(self._rows))), []
        row, reached = start, 0.0
        while True:
            self._reach(row, reached, left, distances, before)
            column = min(left, key=lambda column: (distances[column], column))
            reached = distances[column]
            row = self._rows[column]
            if row < 0:
                break
            left.remove(column)
            passed.append(column)
        self._update_prices(start, passed, distances, reached)
        self._match(start, column, before)

    def _reach(self, row: int, reached: float, left: set[int], distances: list[float], before: list[int]) -> None:
        """Shorten the distances of the columns that are left, by paths through this row."""
        offset, prices, gains = reached + self._row_prices[row], self._column_prices, self._gains[row]
        for column in left:
            distance = offset + prices[column] - gains[column]
            if distance < distances[column]:
                distances[column], before[column] = distance, row

    def _update_prices(self, start: int, passed: list[int], distances: list[float], reached: float) -> None:
        self._row_prices[start] -= reached
        for column in passed:
            self._column_prices[column] += reached - distances[column]
            self._row_prices[self._rows[column]] -= reached - distances[column]

    def _match(self, start: int, column: int, before: list[int]) -> None:
        """Match along the path that ends at `column`: each row takes the next column, and gives up its own."""
        while column >= 0:
            row = before[column]
            self._rows[column] = row
            self.columns[row], column = column, self.columns[row]
