"""Fetches a URL under a policy. Every redirect is checked, and only checked addresses are connected to."""

import asyncio
import base64
import binascii
import logging
import socket
from typing import Any
from urllib.parse import unquote_to_bytes

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from baton.errors import InvalidRequest
from baton.media.policy import Policy, Refused
from baton.protocol.media import MediaUrl

log = logging.getLogger(__name__)

MAX_HOPS = 5
CHUNK_BYTES = 256 * 1024
REDIRECTS = (301, 302, 303, 307, 308)
# No compression: decompressed data could be far larger than the bytes that the limit counts.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "baton"}


class Fetcher:
    """Fetches under one policy, with its own connections. Event-loop thread only."""

    def __init__(self, policy: Policy, resolver: AbstractResolver | None = None) -> None:
        self._policy = policy
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, media: MediaUrl) -> bytes:
        """Return the content of a URL. Raises InvalidRequest with the place of the URL in the request."""
        try:
            if media.url[:5].lower() == "data:":
                return await asyncio.to_thread(_read_data_url, media.url, self._policy.options.max_bytes)
            async with asyncio.timeout(self._policy.options.timeout_s):
                return await self._get(URL(media.url))
        except Refused as error:
            problem = str(error)
        except TimeoutError:
            problem = f"fetching it took longer than {self._policy.options.timeout_s:g} s"
        except (aiohttp.ClientError, ValueError, OSError) as error:
            problem = _public_reason(error)
            log.info("%s: %s: %r", media.place, problem, error)
        raise InvalidRequest(f"{media.place}: {problem}")

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _get(self, url: URL) -> bytes:
        for _ in range(MAX_HOPS):
            self._policy.check_url(url)
            async with self._open().get(url, allow_redirects=False, headers=HEADERS) as response:
                target = response.headers.get("Location")
                if response.status in REDIRECTS and target is not None:
                    url = url.join(URL(target))
                    continue
                if response.status != 200:
                    raise Refused(f"the host answered with status {response.status}")
                return await self._read(response)
        raise Refused(f"the host redirects more than {MAX_HOPS} times")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        limit = self._policy.options.max_bytes
        _refuse_large(response.content_length or 0, limit)
        data = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            data += chunk
            _refuse_large(len(data), limit)
        return bytes(data)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = _CheckedResolver(self._policy, self._resolver or ThreadedResolver())
            # Every connection resolves, and so checks, the host again. Proxies of the environment are not used.
            connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False)
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


def _read_data_url(url: str, limit: int) -> bytes:
    """Return the content of a data URL. Raises Refused."""
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise Refused("the data URL has no data")
    if head.lower().endswith(";base64"):
        _refuse_large(len(body) // 4 * 3 - 2, limit)
        try:
            data = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise Refused("the data URL is not base64") from None
    else:
        _refuse_large(len(body) // 3, limit)
        data = unquote_to_bytes(body)
    _refuse_large(len(data), limit)
    return data


def _refuse_large(size: int, limit: int) -> None:
    if size > limit:
        raise Refused(f"it is larger than the limit of {limit} bytes")


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
