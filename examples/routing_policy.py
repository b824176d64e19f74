"""A routing policy of your own: a gateway that names the worker of each request, before `baton serve --router direct`.

    python examples/routing_policy.py --listen 8080 --endpoint http://127.0.0.1:8000

`choose_worker` is the policy; replace it. This one keeps the requests of a user on one worker, so that a user's prompts
are in one prefix cache and in no other. When a worker goes, only its users move (rendezvous hashing).
"""

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence

import aiohttp
from aiohttp import web

WORKER_HEADER = "x-dynamo-worker-instance-id"
REFRESH_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=600, connect=5)
# Headers of one connection, which are not passed on.
HOP_BY_HOP = {"connection", "host", "content-length", "transfer-encoding", "keep-alive", "upgrade", WORKER_HEADER}


def choose_worker(request: Mapping[str, object], workers: Sequence[int]) -> int:
    """Return the worker of a request: a pure function of the request and of the workers that serve, never empty."""
    user = str(request.get("user", ""))
    return max(workers, key=lambda worker: hashlib.sha256(f"{user}/{worker}".encode()).digest())


class Gateway:
    """Forwards requests to the endpoint, and its answers as they arrive. Closes with its session."""

    def __init__(self, endpoint: str, session: aiohttp.ClientSession) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._session = session
        self._workers: list[int] = []
        self._read_at = 0.0

    async def workers(self) -> list[int]:
        """Return the ids of the workers that serve, read again at most twice a second."""
        if time.monotonic() - self._read_at > REFRESH_S:
            async with self._session.get(f"{self._endpoint}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                listed = (await answer.json())["instances"]
            self._workers = sorted(each["instance_id"] for each in listed if each["endpoint"] == "generate")
            self._read_at = time.monotonic()
        return self._workers

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. A client that leaves ends the request to the endpoint, which cancels it."""
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        if request.method == "POST":
            workers = await self.workers()
            if not workers:
                return web.json_response({"error": {"message": "no worker serves", "type": "server_error"}}, status=503)
            headers[WORKER_HEADER] = str(choose_worker(_content(body), workers))
        url = f"{self._endpoint}{request.path_qs}"
        async with self._session.request(request.method, url, data=body, headers=headers) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
        return answer


def _content(body: bytes) -> Mapping[str, object]:
    """Return the JSON object of a body; the endpoint refuses bodies that have none."""
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


async def make_application(endpoint: str) -> web.Application:
    """Return the gateway as an application."""
    application = web.Application(client_max_size=64 * 2**20)
    session = aiohttp.ClientSession(timeout=TIMEOUT)
    gateway = Gateway(endpoint, session)
    application.router.add_route("*", "/{path:.*}", gateway.forward)
    application.on_cleanup.append(lambda _: session.close())
    return application


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", type=int, default=8080, help="port on loopback")
    parser.add_argument("--endpoint", default="http://127.0.0.1:8000", help="a Baton endpoint with --router direct")
    args = parser.parse_args()
    web.run_app(make_application(args.endpoint), host="127.0.0.1", port=args.listen, handler_cancellation=True)


if __name__ == "__main__":
    main()
