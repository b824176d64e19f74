"""Reads what a URL names, under a policy. Every redirect is checked, and only checked addresses are connected to."""

import logging
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from baton.errors import InvalidRequest
from baton.media.byte_budget import RequestBytes
from baton.media.data_urls import is_data_url, least_size, read_data_url
from baton.media.local_files import LocalFiles
from baton.media.names import NameLookup
from baton.media.policy import Policy, Refused, refuse_large
from baton.media.threads import ThreadPool
from baton.protocol.media import MediaUrl

log = logging.getLogger(__name__)

MAX_HOPS = 5
CHUNK_BYTES = 256 * 1024
CONNECTIONS = 256
CONNECTIONS_PER_HOST = 32
READERS = 4
REDIRECTS = (301, 302, 303, 307, 308)
# No compression: decompressed data could be far larger than the bytes that the limit counts.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "baton"}


class Fetcher:
    """Fetches under one policy, with its own connections. Event-loop thread only. Raises ConfigError."""

    def __init__(self, policy: Policy, resolver: AbstractResolver | None = None) -> None:
        self._policy = policy
        self._resolver = resolver
        self._local = LocalFiles(policy.options.local_dirs)
        self._readers = ThreadPool("media-files", READERS)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, media: MediaUrl, share: RequestBytes) -> bytes:
        """Return the content of a URL, whose bytes are taken from `share`. The caller sets a time limit.

        Raises InvalidRequest with the place of the URL in the request, and what `RequestBytes.take` raises.
        """
        try:
            return await self._read(media.url, share)
        except TimeoutError:
            raise
        except Refused as error:
            problem = str(error)
        except (aiohttp.ClientError, ValueError, OSError) as error:
            problem = _public_reason(error)
            log.info("%s: %s: %r", media.place, problem, error)
        raise InvalidRequest(f"{media.place}: {problem}")

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        self._readers.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _read(self, url: str, share: RequestBytes) -> bytes:
        limit = self._policy.options.max_bytes
        if is_data_url(url):
            refuse_large(least_size(url), limit)
            data = await self._readers.run(read_data_url, url)
        elif url[:5].lower() == "file:":
            data = await self._readers.run(self._local.read, url, limit)
        else:
            return await self._get(URL(url), share)
        refuse_large(len(data), limit)
        share.take(len(data))
        return data

    async def _get(self, url: URL, share: RequestBytes) -> bytes:
        for _ in range(MAX_HOPS):
            self._policy.check_url(url)
            async with self._open().get(url, allow_redirects=False, headers=HEADERS) as response:
                target = response.headers.get("Location")
                if response.status in REDIRECTS and target is not None:
                    url = url.join(URL(target))
                    continue
                if response.status != 200:
                    raise Refused(f"the host answered with status {response.status}")
                return await self._receive(response, share)
        raise Refused(f"the host redirects more than {MAX_HOPS} times")

    async def _receive(self, response: aiohttp.ClientResponse, share: RequestBytes) -> bytes:
        limit = self._policy.options.max_bytes
        refuse_large(response.content_length or 0, limit)
        data = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            refuse_large(len(data) + len(chunk), limit)
            share.take(len(chunk))
            data += chunk
        return bytes(data)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = _CheckedResolver(self._policy, self._resolver or NameLookup())
            # Every connection resolves, and so checks, the host again. Proxies of the environment are not used.
            connector = aiohttp.TCPConnector(
                resolver=resolver, use_dns_cache=False, limit=CONNECTIONS, limit_per_host=CONNECTIONS_PER_HOST
            )
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
            )
        return self._session


class _CheckedResolver(AbstractResolver):
    """Resolves hosts to allowed addresses only, so that a second lookup cannot return another one (DNS rebinding)."""

    def __init__(self, policy: Policy, inner: AbstractResolver) -> None:
        self._policy = policy
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the allowed addresses of `host`. Raises OSError if there are none; the connector passes it on."""
        allowed: list[ResolveResult] = []
        refusal: Refused | None = None
        for address in await self._inner.resolve(host, port, family):
            try:
                self._policy.check_address(address["host"])
                allowed.append(address)
            except Refused as error:
                refusal = error
        if not allowed:
            raise OSError(None, str(refusal or "the host has no address"))
        return allowed

    async def close(self) -> None:
        """See `AbstractResolver.close`."""
        await self._inner.close()


def _public_reason(error: Exception) -> str:
    """Return the reason for the client. It must not reveal anything about the network of the worker."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return _policy_reason(error.os_error, "the host cannot be found")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return "the host's certificate is not trusted"
        case aiohttp.ClientConnectorError():
            return "the host cannot be reached"
        case aiohttp.InvalidURL() | ValueError():
            return "it is not a URL"
    return "the host did not send it"


def _policy_reason(error: Any, default: str) -> str:
    return error.strerror if isinstance(error, OSError) and error.errno is None and error.strerror else default
