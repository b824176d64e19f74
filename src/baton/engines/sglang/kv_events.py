"""SGLang's KV events as those of `protocol/events.py`, rank by rank. Imports no SGLang.

SGLang hashes a block from its tokens, its salt and all blocks before it, without a seed: equal content has equal hashes
on every worker. Its messages are numbered.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from baton.engine_kit.kv_ledger import KvLedger
from baton.protocol.events import KvEvent

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
DEVICE_MEDIA = (None, "GPU")
_FIRST_OF_MEDIA = 2**31

log = logging.getLogger(__name__)


class RankEvents:
    """The events of one data-parallel rank, in order."""

    def __init__(self, rank: int, block_size: int) -> None:
        self._rank = rank
        self._ledger = KvLedger(block_size, rank, first_number=0)

    def read(self, number: int, payload: bytes) -> list[KvEvent]:
        """Return the events of message `number`. A missing message and an unreadable one are gaps."""
        events = self._ledger.advance(number)
        try:
            for event in _events_in(payload):
                events += self._translated(event)
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError):
            log.warning("rank %d: a message about KV blocks cannot be read", self._rank, exc_info=True)
            events += self._ledger.gap()
        return events

    def _translated(self, event: Mapping[str, Any]) -> list[KvEvent]:
        kind = event.get("type")
        if kind == CLEARED:
            return self._ledger.cleared()
        if event.get("medium") not in DEVICE_MEDIA:
            return []  # copies in slower memory
        if kind == REMOVED:
            return self._ledger.removed(map(_signed, event["block_hashes"]))
        return self._stored(event) if kind == STORED else []

    def _stored(self, event: Mapping[str, Any]) -> list[KvEvent]:
        parent = event.get("parent_block_hash")
        return self._ledger.stored(
            [_signed(name) for name in event["block_hashes"]],
            list(_plain(event["token_ids"])),
            None if parent is None else _signed(parent),
            lora_name=event.get("lora_name") or None,
            cache_salt=event.get("cache_salt") or None,
        )


def _events_in(payload: bytes) -> list[Mapping[str, Any]]:
    _, events, *_ = msgspec.msgpack.decode(payload)
    return [event for event in events if isinstance(event, dict)]


def _plain(tokens: Iterable[Any]) -> Iterator[int]:
    """Yield single tokens of 32 bits, as routers take them.

    Speculative decoding keys its cache by pairs of a token and its successor. In the place of media SGLang has parts of
    their hashes, which are larger than any token.
    """
    return (_token(token[0] if isinstance(token, list) else token) for token in tokens)


def _token(value: int) -> int:
    return value if value < _FIRST_OF_MEDIA else _FIRST_OF_MEDIA + value % _FIRST_OF_MEDIA


def _signed(name: int) -> int:
    return (name + 2**63) % 2**64 - 2**63
