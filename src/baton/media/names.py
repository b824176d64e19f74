"""Host names to addresses, on threads of their own.

A name server that does not answer blocks a thread for as long as the C library waits. So there are many threads, few of
them for the names of one domain, and one for all requests that look up the same name at a time. A client with one slow
domain cannot keep others from resolving theirs.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable

from aiohttp.abc import AbstractResolver, ResolveResult

from baton.media.threads import ThreadPool

THREADS = 64
THREADS_PER_DOMAIN = 4
TIMEOUT_S = 4.0

COUNTRY_SUFFIXES = frozenset(("ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org"))
"""Labels below which a country registers domains: example.co.uk. Others may be domains of one owner: abc.de."""

_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
Found = list[tuple[int, str]]
Lookup = Callable[[str, socket.AddressFamily], Found]


def look_up(host: str, family: socket.AddressFamily) -> Found:
    """Return the family and the address of each address of `host`. Blocks. Raises OSError."""
    found = socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [(kind, str(address[0])) for kind, _, _, _, address in found]


class NameLookup(AbstractResolver):
    """Resolves names with `lookup`, which blocks. Event-loop thread only."""

    def __init__(self, lookup: Lookup = look_up, timeout_s: float = TIMEOUT_S) -> None:
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._pool = ThreadPool("media-names", THREADS)
        self._running: dict[tuple[str, int], asyncio.Future[Found]] = {}
        self._of_domain: Counter[str] = Counter()
        self._ended = asyncio.Event()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of `host`. Raises OSError, also when it takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._find(host.rstrip(".").lower(), family)
        except TimeoutError:
            raise OSError(None, f"the host's name could not be resolved within {self._timeout_s:g} s") from None
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=_NUMERIC)
            for kind, address in found
        ]

    async def close(self) -> None:
        """See `AbstractResolver.close`."""
        self._pool.close()

    async def _find(self, host: str, family: socket.AddressFamily) -> Found:
        domain = _domain(host)
        while (running := self._running.get((host, family))) is None and (
            self._of_domain[domain] >= THREADS_PER_DOMAIN
        ):
            await self._ended.wait()
        if running is None:
            running = self._start(host, family, domain)
        return await asyncio.shield(running)

    def _start(self, host: str, family: socket.AddressFamily, domain: str) -> asyncio.Future[Found]:
        running = self._pool.submit(self._lookup, host, family)
        self._running[host, family] = running
        self._of_domain[domain] += 1

        def ended(done: asyncio.Future[Found]) -> None:
            if not done.cancelled():
                done.exception()  # marks it as retrieved: those who waited may be gone
            del self._running[host, family]
            self._of_domain[domain] -= 1
            self._of_domain += Counter()  # drops zeros
            self._ended.set()
            self._ended = asyncio.Event()

        running.add_done_callback(ended)
        return running


def _domain(host: str) -> str:
    """Return the part of `host` that one owner has registered, as far as its labels tell."""
    labels = host.split(".")
    below_country = len(labels[-1]) == 2 and COUNTRY_SUFFIXES.issuperset(labels[-2:-1])
    return ".".join(labels[-3 if below_country else -2 :])
