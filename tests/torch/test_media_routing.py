"""KV routing of prompts with images: the frontend's router finds the blocks of an image that a worker has published.

The runtime's frontend is asked over HTTP: its hash of the image and its expansion of the prompt are compared with ours.
"""

import asyncio
import base64
import json
import socket
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dynamo import _core

from baton.config.runtime import RuntimeOptions
from baton.ports.runtime import Context, Service, Wire
from baton.protocol.codec import decode_request
from baton.protocol.events import KvStored, RoutedRows
from baton.protocol.requests import GenerateRequest
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.testing import run_bounded
from baton.testing.runtime_contract import CARD, PATH
from tests.vision_models import make_tiny_qwen25vl, noise_png, special_token

ROWS = 16  # of an image of 112 x 112 pixels
QUESTION = " is a picture. Describe everything in it, from the left to the right"


class _Frontend:
    """A frontend in this process, and what a worker gets from it."""

    def __init__(self, directory: Path, runtime: DynamoRuntime) -> None:
        self._directory = directory
        self._runtime = runtime
        self._received: list[Wire] = []
        self._served: asyncio.Future[None] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    async def start(self) -> Any:
        """Serve one model with a worker that answers nothing; return its endpoint."""
        service = Service(self._answer, lambda request: request, lambda reply: reply)
        endpoint = await self._runtime.serve(PATH, service)
        await endpoint.register_model(msgspec.structs.replace(CARD, directory=str(self._directory), dp_size=1))
        arguments = _core.EntrypointArgs(
            _core.EngineType.Dynamic,
            http_host="127.0.0.1",
            http_port=self._port,
            router_config=_core.RouterConfig(_core.RouterMode.KV, _core.KvRouterConfig()),
        )
        engine = await _core.make_engine(self._runtime.raw, arguments)
        self._served = asyncio.ensure_future(_core.run_input(self._runtime.raw, "http", engine))
        return endpoint

    async def ended(self) -> None:
        """Wait until it no longer listens."""
        if self._served is not None:
            await asyncio.wait([self._served], timeout=10)

    async def request(self, image: bytes) -> Wire:
        """Ask about an image until the frontend knows the model; return what the worker got."""
        while not self._received:
            await asyncio.sleep(0.05)
            await asyncio.to_thread(self._ask, image)
        return self._received.pop()

    def _ask(self, image: bytes) -> None:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        body = {"model": CARD.name, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except OSError:
            return

    async def _answer(self, request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
        self._received.append(request)
        yield {"token_ids": [1], "finish_reason": "stop"}


def stored(request: GenerateRequest) -> KvStored:
    """Return the event of a worker that has computed the prompt of `request`, an image with one placeholder."""
    pad = special_token("qwen", "<|image_pad|>")
    start = request.token_ids.index(pad)
    tokens = (*request.token_ids[:start], *[pad] * ROWS, *request.token_ids[start + 1 :])
    blocks = len(tokens) // CARD.block_size
    return KvStored(
        tuple(range(1, blocks + 1)),
        tokens[: blocks * CARD.block_size],
        CARD.block_size,
        media=(RoutedRows(start, start + ROWS, *request.image_routing_hashes),),
    )


def test_the_router_finds_the_blocks_of_the_same_image_and_not_of_another(tmp_path: Path) -> None:
    directory = make_tiny_qwen25vl(tmp_path / "model")

    async def body() -> None:
        runtime = DynamoRuntime(RuntimeOptions(directory=str(tmp_path / "discovery")), subscribes=True)
        await runtime.start()
        frontend = _Frontend(directory, runtime)
        try:
            endpoint = await frontend.start()
            one, same, other = [await frontend.request(noise_png(112, 112, seed)) for seed in (1, 1, 2)]
            event = stored(decode_request(one))
            router = _core.KvRouter(runtime.raw.endpoint(PATH), CARD.block_size, _core.KvRouterConfig())

            async def found(request: Wire) -> int:
                return int((await router.best_worker(request["mm_routing_info"]["routing_token_ids"]))[2])

            while await found(same) != len(event.block_hashes):
                endpoint.publish(event)  # again: an event is lost while the router's subscription is not connected
                await asyncio.sleep(0.05)
            assert await found(other) == 0
        finally:
            await runtime.shutdown()
            await frontend.ended()

    run_bounded(body(), 60)


@pytest.mark.parametrize("hashes", [None, "ab", [1], ["xyz"], ["ab", "../"], ["1" * 17], {}])
def test_hashes_that_are_no_numbers_are_ignored(hashes: object) -> None:
    request = GenerateRequest(token_ids=(1,), extra_args={"mm_hashes": hashes})
    assert request.image_routing_hashes == ()
