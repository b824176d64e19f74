"""One engine in a process of its own, for tests that need a second one: a process can have only one SGLang.

Usage: peer.py MODEL MODE [SGLANG ARGUMENT]... It reads commands as JSON, one a line, and answers so.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.ports.engine import Work
from baton.protocol.handoff import Bootstrap, Consume, Handoff, LocalProbe, Produce
from baton.protocol.ids import RequestId
from baton.protocol.media import EncodedItem, MediaEmbedding
from baton.protocol.outputs import TokenDelta
from baton.protocol.requests import Sampling, StopConditions
from tests.real_sglang.engines import TestedEngine


def say(**answer: object) -> None:
    print("@" + json.dumps(answer), flush=True)


def handoff_of(order: dict[str, Any]) -> Handoff | None:
    """Return what an order says of the other side."""
    if order["do"] == "probe":
        return LocalProbe()
    if order["do"] == "generate":
        return None
    place = Bootstrap(host=order["host"], port=order["port"], room=order["room"])
    return Produce(bootstrap=place) if order["do"] == "produce" else Consume(source=place)


def media_of(order: dict[str, Any]) -> tuple[MediaEmbedding, ...]:
    """Return the media of an order, which `media_order` has written."""
    return tuple(
        MediaEmbedding(
            item=msgspec.convert(each["item"], EncodedItem),
            position=each["position"],
            dtype=each["dtype"],
            size=each["size"],
            data=None if each["data"] is None else memoryview(base64.b64decode(each["data"])),
        )
        for each in order.get("media", ())
    )


def media_order(media: tuple[MediaEmbedding, ...]) -> list[dict[str, Any]]:
    """Return media as JSON."""
    return [
        {
            "item": msgspec.to_builtins(each.item),
            "position": each.position,
            "dtype": each.dtype,
            "size": each.size,
            "data": None if each.data is None else base64.b64encode(each.data).decode(),
        }
        for each in media
    ]


async def generate(engine: TestedEngine, order: dict[str, Any]) -> None:
    """Answer with the tokens of one request, and with what it failed with."""
    tokens: list[int] = []
    problem: str | None = None
    try:
        stream = engine.submit(
            Work(
                request_id=RequestId(order["id"]),
                token_ids=tuple(order["prompt"]),
                media=media_of(order),
                max_tokens=order.get("tokens", 1),
                sampling=Sampling(temperature=0.0),
                stop=StopConditions(ignore_eos=True),
                handoff=handoff_of(order),
                dp_rank=order.get("dp_rank"),
            )
        )
        while outputs := await stream.read():
            tokens += [t for output in outputs if isinstance(output, TokenDelta) for t in output.token_ids]
    except BatonError as error:
        problem = error.code
    say(id=order["id"], tokens=tokens, problem=problem)


async def main(model: str, mode: Any, *args: str) -> None:
    engine = TestedEngine(Path(model), mode, *args)
    try:
        info = await engine.start()
        say(host=info.handoff_host, port=info.handoff_port)
        async with asyncio.TaskGroup() as group:
            while line := await asyncio.to_thread(sys.stdin.readline):
                order = json.loads(line)
                if order["do"] == "abort":
                    await engine.abort(RequestId(order["id"]))
                    progress = engine.progress()
                    say(aborted=order["id"], busy=progress.running + progress.waiting)
                elif order["do"] == "stop":
                    break
                else:
                    group.create_task(generate(engine, order))
            await engine.stop()
    except BatonError as error:
        say(failed=error.code, message=error.message)
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
