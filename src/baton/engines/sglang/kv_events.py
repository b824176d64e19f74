"""SGLang's KV events in the words of `protocol/events.py`, rank by rank. Imports no SGLang.

SGLang names a block by a hash of its tokens, its salt and everything before it, with no seed: equal content has equal
names on every worker. Its messages are numbered; when one is missing, everything told before is taken back, and only
what can be connected to what was told since is told again.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
DEVICE = (None, "GPU")

log = logging.getLogger(__name__)


class RankEvents:
    """The events of one data-parallel rank, in order."""

    def __init__(self, rank: int, page: int) -> None:
        self._rank = rank
        self._page = page
        self._next = 0
        self._told: set[int] = set()

    def read(self, number: int, payload: bytes) -> list[KvEvent]:
        """Return what message `number` tells; with a gap before it, first that nothing is known any more.

        A message that cannot be read is a gap of its own.
        """
        events = [] if number == self._next else self._lost()
        self._next = number + 1
        try:
            for event in _events_in(payload):
                events += self._translated(event)
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError):
            log.warning("rank %d: a message about KV blocks cannot be read", self._rank, exc_info=True)
            events += self._lost()
        return events

    def _lost(self) -> list[KvEvent]:
        self._told.clear()
        return [KvCleared(self._rank)]

    def _translated(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        kind = event.get("type")
        if kind == CLEARED:
            if self._told:
                self._told.clear()
                yield KvCleared(self._rank)
        elif event.get("medium") not in DEVICE:
            return  # copies in slower memory; what the device holds is what counts
        elif kind == REMOVED:
            gone = tuple(name for name in map(_signed, event["block_hashes"]) if name in self._told)
            self._told.difference_update(gone)
            if gone:
                yield KvRemoved(gone, self._rank)
        elif kind == STORED:
            yield from self._stored(event)

    def _stored(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        names = tuple(map(_signed, event["block_hashes"]))
        parent = event.get("parent_block_hash")
        parent = None if parent is None else _signed(parent)
        tokens = tuple(_plain(event["token_ids"]))
        connected = parent is None or parent in self._told
        if not connected or event["block_size"] != self._page or len(tokens) != len(names) * self._page:
            return
        self._told.update(names)
        yield KvStored(
            names,
            tokens,
            self._page,
            parent,
            self._rank,
            event.get("lora_name") or None,
            event.get("cache_salt") or None,
        )


def _events_in(payload: bytes) -> list[Mapping[str, Any]]:
    _, events, *_ = msgspec.msgpack.decode(payload)
    return [event for event in events if isinstance(event, dict)]


def _plain(tokens: Iterable[Any]) -> Iterator[int]:
    """Speculative decoding keys its cache by pairs: a token and the one after it."""
    return (token[0] if isinstance(token, list) else token for token in tokens)


def _signed(name: int) -> int:
    return (name + 2**63) % 2**64 - 2**63
