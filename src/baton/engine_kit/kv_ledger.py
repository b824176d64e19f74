"""Which KV blocks of one data-parallel rank are published to routers. Pure and synchronous; knows no engine.

An engine adapter reports what its cache does; the ledger returns the KV events to publish. A router that applies them
in order always knows the parent of a block, stores a block once, and removes only blocks that it has.
"""

from collections.abc import Iterable, Sequence, Set

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored, RoutedRows


def rows_within(rows: Iterable[RoutedRows], start: int, stop: int) -> tuple[RoutedRows, ...]:
    """Return the parts of `rows` among tokens [start, stop), counted from `start`."""
    return tuple(
        RoutedRows(max(row.start, start) - start, min(row.stop, stop) - start, row.routing_hash)
        for row in rows
        if row.start < stop and row.stop > start
    )


class KvLedger:
    """The published blocks of one rank.

    Engines that number their messages pass each number to `advance`. `first_number` is the first one expected; None
    accepts any.
    """

    def __init__(self, block_size: int, dp_rank: int = 0, first_number: int | None = None) -> None:
        self._block_size = block_size
        self._dp_rank = dp_rank
        self._next_number = first_number
        self._published: set[int] = set()

    @property
    def published_blocks(self) -> Set[int]:
        """Hashes of the blocks that routers know of. Never more than the engine's cache holds."""
        return self._published

    def advance(self, number: int) -> list[KvEvent]:
        """Take the number of the next message. A number that does not follow the last one is a gap."""
        expected, self._next_number = self._next_number, number + 1
        return [] if expected is None or number == expected else self.gap()

    def gap(self) -> list[KvEvent]:
        """Withdraw every block, because events were lost: removals among them, or events that were published.

        Blocks stored before the gap are published again only when the engine stores them again.
        """
        self._published.clear()
        return [KvCleared(self._dp_rank)]

    def cleared(self) -> list[KvEvent]:
        """The engine has dropped every block. Publishes nothing if no block was published."""
        return self.gap() if self._published else []

    def removed(self, block_hashes: Iterable[int]) -> list[KvEvent]:
        """The engine has dropped these blocks. Unpublished ones are ignored."""
        removed = tuple(name for name in dict.fromkeys(block_hashes) if name in self._published)
        self._published.difference_update(removed)
        return [KvRemoved(removed, self._dp_rank)] if removed else []

    def stored(
        self,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        parent_hash: int | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        media: Iterable[RoutedRows] = (),
    ) -> list[KvEvent]:
        """The engine has stored a chain of blocks after `parent_hash`. Each run of unpublished blocks is one event.

        `media` are rows of media among `token_ids`.

        A chain whose parent is not published is dropped, because a router could not place it; so is one whose blocks
        are not full.
        """
        size = self._block_size
        orphan = parent_hash is not None and parent_hash not in self._published
        if orphan or len(token_ids) != len(block_hashes) * size:
            return []
        events: list[KvEvent] = []
        for start, stop in self._unpublished_runs(block_hashes):
            names = tuple(block_hashes[start:stop])
            self._published.update(names)
            events.append(
                KvStored(
                    block_hashes=names,
                    token_ids=tuple(token_ids[start * size : stop * size]),
                    block_size=size,
                    parent_hash=block_hashes[start - 1] if start else parent_hash,
                    dp_rank=self._dp_rank,
                    lora_name=lora_name,
                    cache_salt=cache_salt,
                    media=rows_within(media, start * size, stop * size),
                )
            )
        return events

    def _unpublished_runs(self, block_hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the index ranges [start, stop) of consecutive unpublished blocks."""
        runs: list[tuple[int, int]] = []
        seen: set[int] = set()
        for index, name in enumerate(block_hashes):
            if name in self._published or name in seen:
                continue
            seen.add(name)
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return runs
