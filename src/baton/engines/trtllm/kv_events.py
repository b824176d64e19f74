"""KV events of the library as the events that Baton publishes. Pure and synchronous.

Published are full blocks of global attention, by rank; `KvLedger` keeps the events of a rank consistent.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.engine_kit.kv_ledger import KvLedger
from baton.protocol.events import KvEvent

Raw = Mapping[str, object]


class KvEvents:
    """Translates the events of one engine."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ranks: dict[int, _RankEvents] = {}

    def translate(self, raw: Raw) -> Iterator[KvEvent]:
        """Yield the events to publish. Raises KeyError, TypeError or ValueError for an event of unknown format."""
        yield from self._rank(raw).translate(raw)

    def unreadable(self, raw: Raw) -> list[KvEvent]:
        """Return what withdraws the blocks of the rank of an event that `translate` raised for: it may remove some."""
        return self._rank(raw).ledger.cleared()

    def unpublish(self) -> list[KvEvent]:
        """Return the events that withdraw every block, because published events were lost."""
        return [event for rank in self._ranks.values() for event in rank.ledger.gap()]

    def _rank(self, raw: Raw) -> "_RankEvents":
        number = raw.get("attention_dp_rank")
        rank = number if isinstance(number, int) else 0
        if rank not in self._ranks:
            self._ranks[rank] = _RankEvents(rank, self._block_size)
        return self._ranks[rank]


class _Chain(NamedTuple):
    """The leading blocks of a stored event that can be published."""

    block_hashes: list[int]
    token_ids: list[int]
    salt: object


class _RankEvents:
    """The events of one rank.

    The library numbers its events; its buffer drops some if they are not read in time.

    Models with several kinds of attention report each block once for every kind. Only the kind with the widest window
    decides whether a prompt can be reused. `created` events list all windows before any block is stored; without them
    the widest window so far counts, and a wider one withdraws the blocks of the narrower one.
    """

    def __init__(self, rank: int, block_size: int) -> None:
        self.ledger = KvLedger(block_size, rank)
        self._block_size = block_size
        self._widest = -1
        self._group: object = None

    def translate(self, raw: Raw) -> Iterator[KvEvent]:
        data = raw["data"]
        if not isinstance(data, Mapping):
            raise TypeError("the data of an event is not an object")
        event_id = raw.get("event_id")
        if isinstance(event_id, int):
            yield from self.ledger.advance(event_id)
        yield from self._widen(raw.get("window_size"))
        if not self._is_of_widest_window(raw):
            return
        match data["type"]:
            case "stored":
                yield from self._stored(data)
            case "removed":
                yield from self.ledger.removed(_hashes(data["block_hashes"]))
            case _:  # an "updated" block moves to another memory tier and stays in the cache
                pass

    def _widen(self, window: object) -> list[KvEvent]:
        if not isinstance(window, int) or window <= self._widest:
            return []
        self._widest = window
        self._group = None
        return self.ledger.cleared()

    def _is_of_widest_window(self, raw: Raw) -> bool:
        """Of several groups of layers with the widest window, the first one counts."""
        window, group = raw.get("window_size"), raw.get("layer_group_id")
        if isinstance(window, int) and window < self._widest:
            return False
        if group is not None and self._group is None:
            self._group = group
        return group == self._group

    def _stored(self, data: Raw) -> list[KvEvent]:
        blocks = data["blocks"]
        if not isinstance(blocks, list):
            raise TypeError("the blocks of a stored event are not a list")
        chain = self._publishable(blocks)
        salt = chain.salt if isinstance(chain.salt, str) else None
        parent = _hash(data.get("parent_hash"))
        return self.ledger.stored(chain.block_hashes, chain.token_ids, parent, cache_salt=salt)

    def _publishable(self, blocks: list[Raw]) -> _Chain:
        """Cut a chain before a block that a router cannot match: not full, unnamed, with media, or of another salt."""
        chain = _Chain([], [], blocks[0].get("cache_salt") if blocks else None)
        for block in blocks:
            name, tokens = _hash(block["block_hash"]), _token_ids(block["tokens"])
            if name is None or len(tokens) != self._block_size:
                break
            if block.get("mm_keys") or block.get("cache_salt") != chain.salt:
                break
            chain.block_hashes.append(name)
            chain.token_ids.extend(tokens)
        return chain


def _token_ids(tokens: object) -> list[int]:
    if not isinstance(tokens, list):
        raise TypeError("the tokens of a block are not a list")
    return [int(token["token_id"]) for token in tokens]


def _hashes(names: object) -> list[int]:
    if not isinstance(names, list):
        raise TypeError("the block_hashes of a removed event are not a list")
    return [name for name in map(_hash, names) if name is not None]


def _hash(name: object) -> int | None:
    """Return the hash of a block as a signed 64-bit number. Newer versions have longer ones, in hexadecimal."""
    match name:
        case None:
            return None
        case str():
            number = int(name, 16)
        case int():
            number = name
        case _:
            raise TypeError(f"{name!r} is not the hash of a block")
    return (number + 2**63) % 2**64 - 2**63
