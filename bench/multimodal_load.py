"""The two loads of the multimodal benchmark: requests one at a time, and text streams while pictures arrive."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.disagg_client import TimedResponse
from bench.multimodal_client import Pictures, image_request, stream_chat, text_request
from bench.multimodal_report import MixedCell, RequestCell
from bench.multimodal_system import Deployment, Layout, measured_order, serving
from bench.path import busy_core_s
from bench.systems import SystemFailed

IMAGES = (1, 8)
MIXED = {"two aggregated": Layout(2, 0), "encode + PD": Layout(1, 1)}
STREAMS, STREAM_TOKENS = 4, 200
IMAGE_TOKENS = 4
PACE_S = 1.0
CLIENTS = 4
PICTURES_PER_S = 10
"""Drawn before a load begins, so that drawing takes no time from it; if they run out, more are drawn."""
WARM_UP_TRIES = 50


class Mixture(NamedTuple):
    """The responses of one load of so many seconds."""

    seconds: float
    texts: list[TimedResponse]
    images: list[TimedResponse]


def alone_systems(transports: Sequence[str]) -> dict[str, Layout]:
    """All in one worker, and an encode worker over each transport."""
    return {"all in one": Layout(1, 0)} | {f"E/PD, {name}": Layout(1, 1, name) for name in transports}


def measure_alone(model_name: str, model: Path, transports: Sequence[str], repeats: int) -> Iterator[RequestCell]:
    """One request at a time, each to all systems in turn: with pictures that are new, and with the same ones again."""
    systems = alone_systems(transports)
    with ExitStack() as stack:
        deployments = {name: stack.enter_context(serving(model, layout)) for name, layout in systems.items()}
        for number, deployment in enumerate(deployments.values()):
            uvloop.run(warm_up(deployment, Pictures(1_000 + number)))
        pictures = Pictures(1)
        for repeat in range(repeats):
            for images in IMAGES:
                files = pictures.make(images)
                for cache in ("cold", "warm"):
                    request = image_request(f"{repeat} {images} {cache}", files)
                    for name in measured_order(list(systems), repeat):
                        measured = measure_request(deployments[name], request)
                        yield RequestCell(
                            model=model_name, system=name, images=images, cache=cache, repeat=repeat, **measured
                        )


def measure_request(deployment: Deployment, request: bytes) -> dict[str, float]:
    before = deployment.read()
    response = uvloop.run(stream_chat(deployment.port, request))
    return {"first_s": response.first_s, **deployment.read().since(before)._asdict()}


async def warm_up(deployment: Deployment, pictures: Pictures) -> None:
    """Send pictures until the frontend has found the encode worker, then each size of request once."""
    for number in range(WARM_UP_TRIES):
        await stream_chat(deployment.port, image_request(f"warm-up {number}", pictures.make(1)))
        if not deployment.layout.encoders or deployment.read().transfer_bytes:
            break
        await asyncio.sleep(0.2)
    else:
        raise SystemFailed("the frontend does not call the encode worker")
    for images in IMAGES:
        await stream_chat(deployment.port, image_request(f"warm-up of {images}", pictures.make(images)))


def measure_mixed(model: Path, rounds: int, seconds: float) -> Iterator[MixedCell]:
    """Both systems in every round, each started anew."""
    for number in range(rounds):
        for name in measured_order(list(MIXED), number):
            with serving(model, MIXED[name]) as deployment:
                deployment.pin_workers()
                uvloop.run(warm_up(deployment, Pictures(10_000 + number)))
                cell = measure_system(deployment, name, number, seconds)
            yield cell


def measure_system(deployment: Deployment, name: str, number: int, seconds: float) -> MixedCell:
    load = MixedLoad(deployment.port, number)
    before, began = busy_core_s(), time.monotonic()
    undisturbed = load.run(seconds / 2, clients=0)
    paced = load.run(seconds, clients=1, pace_s=PACE_S)
    saturated = load.run(seconds, clients=CLIENTS)
    busy = (busy_core_s() - before) / (time.monotonic() - began)
    return MixedCell(
        system=name,
        round=number,
        undisturbed_gaps_s=gaps_s(undisturbed.texts),
        paced_gaps_s=gaps_s(paced.texts),
        paced_first_s=[response.first_s for response in paced.images],
        saturated_gaps_s=gaps_s(saturated.texts),
        saturated_first_s=[response.first_s for response in saturated.images],
        images_per_s=len(saturated.images) / saturated.seconds,
        tokens_per_s=sum(len(response.events) for response in saturated.texts) / saturated.seconds,
        busy_cores=busy,
    )


class MixedLoad:
    """Text streams that decode all the time, and clients that send pictures, none of them twice."""

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._pictures = Pictures(100_000 + number)
        self._labels = iter(range(number * 1_000_000, (number + 1) * 1_000_000))

    def run(self, seconds: float, clients: int, pace_s: float = 0.0) -> Mixture:
        """Run the load for `seconds`. With `pace_s`, each client sends at that interval, whatever has been answered."""
        drawn = self._pictures.make(int(PICTURES_PER_S * seconds) if clients else 0)
        return uvloop.run(self._run(seconds, clients, pace_s, drawn))

    async def _run(self, seconds: float, clients: int, pace_s: float, drawn: list[bytes]) -> Mixture:
        texts: list[TimedResponse] = []
        images: list[TimedResponse] = []
        stop_at = time.perf_counter() + seconds

        async def stream() -> None:
            while time.perf_counter() < stop_at:
                text = f"Number {next(self._labels)}: tell me a long story about a fox and a river."
                texts.append(await stream_chat(self._port, text_request(text, STREAM_TOKENS)))

        async def send() -> None:
            request = image_request(str(next(self._labels)), drawn[-1:] or self._pictures.make(1), IMAGE_TOKENS)
            del drawn[-1:]
            images.append(await stream_chat(self._port, request))

        async def send_one_after_the_other() -> None:
            while time.perf_counter() < stop_at:
                await send()

        async def send_in_time() -> None:
            async with asyncio.TaskGroup() as group:
                while time.perf_counter() < stop_at:
                    group.create_task(send())
                    await asyncio.sleep(pace_s)

        senders = send_in_time if pace_s else send_one_after_the_other
        await asyncio.gather(*(stream() for _ in range(STREAMS)), *(senders() for _ in range(clients)))
        return mixture_until(stop_at, seconds, texts, images)


def mixture_until(
    stop_at: float, seconds: float, texts: Sequence[TimedResponse], images: Sequence[TimedResponse]
) -> Mixture:
    """What arrived before `stop_at`: after it, streams go on to their end with no more pictures."""
    return Mixture(
        seconds=seconds,
        texts=[TimedResponse(one.sent_at, [event for event in one.events if event <= stop_at]) for one in texts],
        images=[one for one in images if one.events[-1] <= stop_at],
    )


def gaps_s(responses: Sequence[TimedResponse]) -> list[float]:
    return [gap for response in responses for gap in response.gaps_s]
