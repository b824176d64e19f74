"""Which blocks an engine holds, from its KV events: only what a router can use, and told so that it fits together.

Pure and synchronous. A router hears of full blocks of global attention, after their parents, each gone once. What it
has been told is remembered, for every rank, and that is never more than the cache holds.
"""

from collections.abc import Iterator, Mapping

from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored

Raw = Mapping[str, object]


class KvView:
    """The events of one engine, rank by rank."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ranks: dict[int, _Rank] = {}
        self.gaps = 0

    def take(self, raw: Raw) -> list[KvEvent]:
        """Return what one event means. Raises KeyError, TypeError or ValueError for one whose shape is not known."""
        number = raw.get("attention_dp_rank")
        rank = number if isinstance(number, int) else 0
        view = self._ranks.setdefault(rank, _Rank(rank, self._block_size))
        events = list(view.take(raw))
        self.gaps = sum(each.gaps for each in self._ranks.values())
        return events

    def forget(self) -> list[KvEvent]:
        """Begin anew: what was told before has not been heard."""
        for rank in self._ranks.values():
            list(rank.forget())
        return [KvCleared(rank) for rank in self._ranks]


class _Rank:
    """What one rank has told.

    A gap in its numbers means that events were lost, removals among them, so everything told before may be wrong: the
    router is told that all is gone, and learns again what comes.

    Models with several kinds of attention tell each block once for every kind. Only the one that looks back furthest
    says whether a prompt can be reused. `created` events name all of them before any block is stored; until one does,
    the widest seen so far counts, and a wider one starts anew.
    """

    def __init__(self, rank: int, block_size: int) -> None:
        self._rank = rank
        self._block_size = block_size
        self._told: set[int] = set()
        self._widest = -1
        self._group: object = None
        self._next_id: int | None = None
        self.gaps = 0

    def take(self, raw: Raw) -> Iterator[KvEvent]:
        data = raw["data"]
        if not isinstance(data, Mapping):
            raise TypeError("an event has data")
        yield from self._check_number(raw.get("event_id"))
        yield from self._check_window(raw.get("window_size"))
        if not self._counts(raw):
            return
        match data["type"]:
            case "stored":
                yield from self._stored(data)
            case "removed":
                yield from self._removed(data)
            case _:  # a block that moves to another memory is there still
                pass

    def forget(self) -> Iterator[KvEvent]:
        if self._told:
            self._told.clear()
            yield KvCleared(self._rank)

    def _check_number(self, event_id: object) -> Iterator[KvEvent]:
        if not isinstance(event_id, int):
            return
        if self._next_id is not None and event_id != self._next_id:
            self.gaps += 1
            yield from self.forget()
        self._next_id = event_id + 1

    def _check_window(self, window: object) -> Iterator[KvEvent]:
        if isinstance(window, int) and window > self._widest:
            self._widest = window
            self._group = None
            yield from self.forget()

    def _counts(self, raw: Raw) -> bool:
        window, group = raw.get("window_size"), raw.get("layer_group_id")
        if isinstance(window, int) and window < self._widest:
            return False
        if group is not None and self._group is None:
            self._group = group
        return group == self._group

    def _stored(self, data: Raw) -> Iterator[KvEvent]:
        parent = _hash(data.get("parent_hash"))
        if parent is not None and parent not in self._told:
            return  # the router could not place it
        blocks = data["blocks"]
        if not isinstance(blocks, list):
            raise TypeError("a stored event has blocks")
        hashes: list[int] = []
        tokens: list[int] = []
        salt = blocks[0].get("cache_salt") if blocks else None
        for block in blocks:
            name, content = _hash(block["block_hash"]), [int(token["token_id"]) for token in block["tokens"]]
            # What follows a block that is not full, not named, or not told by its tokens alone, cannot be told either.
            whole = name is not None and len(content) == self._block_size
            if not whole or block.get("mm_keys") or block.get("cache_salt") != salt:
                break
            assert name is not None
            hashes.append(name)
            tokens += content
        if hashes:
            self._told.update(hashes)
            yield KvStored(
                block_hashes=tuple(hashes),
                token_ids=tuple(tokens),
                block_size=self._block_size,
                parent_hash=parent,
                dp_rank=self._rank,
                cache_salt=salt if isinstance(salt, str) else None,
            )

    def _removed(self, data: Raw) -> Iterator[KvEvent]:
        names = data["block_hashes"]
        if not isinstance(names, list):
            raise TypeError("a removed event has block_hashes")
        hashes = tuple(name for name in map(_hash, names) if name in self._told)
        if hashes:
            self._told.difference_update(hashes)
            yield KvRemoved(tuple(name for name in hashes if name is not None), self._rank)


def _hash(name: object) -> int | None:
    """Return a block's name as a signed 64-bit number. Newer caches have longer ones, in hexadecimal."""
    match name:
        case None:
            return None
        case str():
            number = int(name, 16)
        case int():
            number = name
        case _:
            raise TypeError(f"{name!r} is not the name of a block")
    return (number + 2**63) % 2**64 - 2**63
