"""Passes the chat of a browser on to the OpenAI endpoint of the deployment, with its key."""

from collections.abc import Mapping

import aiohttp
import msgspec
from aiohttp import web

from baton.errors import BatonError
from baton.views.process_client import verifies

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0
MODELS_TIMEOUT_S = 5.0
REQUEST_ID = "x-request-id"
_EVENTS_TYPE = "text/event-stream"
_PASSED = ("Content-Type", "Retry-After", REQUEST_ID)


class EndpointUnreachable(BatonError):
    """The OpenAI endpoint of the deployment does not reply."""

    code = "endpoint_unreachable"
    status = 502


class ChatProxy:
    """Forwards requests. A browser that leaves closes the connection to the endpoint, which cancels the request."""

    def __init__(self, api_key: str | None) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()

    async def models(self, endpoint: str) -> web.Response:
        """Return the reply of the endpoint with its models."""
        timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S)
        try:
            async with self._session.get(
                f"{endpoint}/v1/models", headers=self._headers, timeout=timeout, ssl=verifies(endpoint)
            ) as reply:
                return web.Response(body=await reply.read(), status=reply.status, headers=_passed(reply.headers))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(endpoint, error) from None

    async def chat(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        """Send the body of `request` to the endpoint, and its answer back as it arrives.

        A browser that gives its request an id can follow it before the answer begins. The endpoint starts the trace.
        """
        headers = {**self._headers, "Content-Type": "application/json"}
        if (given := request.headers.get(REQUEST_ID)) is not None:
            headers[REQUEST_ID] = given
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        body = await request.read()
        try:
            async with self._session.post(
                f"{endpoint}/v1/chat/completions", data=body, headers=headers, timeout=timeout, ssl=verifies(endpoint)
            ) as reply:
                return await _pass_on(request, reply)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(endpoint, error) from None


async def _pass_on(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status, headers=_passed(reply.headers))
    await response.prepare(request)
    try:
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
    except aiohttp.ClientConnectionResetError:  # the browser has left
        return response
    except (aiohttp.ClientError, TimeoutError) as error:
        await _break_off(request, response, error)
    await response.write_eof()
    return response


async def _break_off(request: web.Request, response: web.StreamResponse, error: Exception) -> None:
    """End an answer that the endpoint has not completed, so that the browser sees it."""
    message = f"the endpoint broke the answer off: {error or type(error).__name__}"
    if response.content_type == _EVENTS_TYPE:
        await response.write(b"\n\ndata: %s\n\n" % msgspec.json.encode({"error": {"message": message}}))
    elif request.transport is not None:
        request.transport.abort()


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {**{name: headers[name] for name in _PASSED if name in headers}, "Cache-Control": "no-store"}


def _unreachable(endpoint: str, error: Exception) -> EndpointUnreachable:
    return EndpointUnreachable(f"the endpoint {endpoint} does not reply: {error or type(error).__name__}")
