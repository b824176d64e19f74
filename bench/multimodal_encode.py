"""Measures encoding alone: Baton's encoder against the tower and connector of transformers, on the same files.

Each library has a process of its own, and they alternate. All compute in float32 with as many threads.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from baton.config.engines import TorchOptions
from baton.engines.torch.vision.encoder import VisionEncoder
from baton.engines.torch.vision.model import read_layout
from baton.engines.torch.vision.prepare import prepare
from baton.engines.torch.vision.runner import TowerRunner
from baton.protocol.media import MediaFile
from bench.multimodal_client import Pictures
from bench.multimodal_report import EncodeCell
from bench.multimodal_system import measured_order

Encode = Callable[[], object]
"""Encodes the same pictures each time."""

AT_ONCE = (1, 8)
BATON, BATON_TOWER = "Baton, from files", "Baton, tower alone"
PEER, PEER_BATCH = "transformers, from files", "transformers, from files, one batch"
PEER_TOWER, PEER_TOWER_BATCH = "transformers, tower alone", "transformers, tower alone, one batch"
_encodes: dict[tuple[str, int], Encode] = {}
"""What this process can measure."""


def prepare_baton(directory: Path, threads: int) -> None:
    """Load the encoder into this process."""
    options = TorchOptions(threads=threads, dtype="float32")
    runner = asyncio.Runner()
    encoder = runner.run(_started(options, directory))
    layout = read_layout(directory)
    tower = TowerRunner(options, directory, layout, lambda done, total: None)
    for count in AT_ONCE:
        files = [MediaFile(modality="image", data=data) for data in Pictures(7).make(count)]
        prepared = [prepare(layout, "model", file) for file in files]
        patches = [part for each in prepared for part in each.patches]
        _encodes[BATON, count] = partial(_encode_at_once, runner, encoder, files)
        _encodes[BATON_TOWER, count] = partial(tower.encode, patches, prepared[0].grid)


async def _started(options: TorchOptions, directory: Path) -> VisionEncoder:
    encoder = VisionEncoder(options, directory)
    await encoder.start()
    return encoder


def _encode_at_once(runner: asyncio.Runner, encoder: VisionEncoder, files: Sequence[MediaFile]) -> None:
    """Encode each file as a request of its own."""

    async def requests() -> None:
        await asyncio.gather(*(encoder.encode([file]) for file in files))

    runner.run(requests())


def prepare_peer(directory: Path, threads: int) -> None:
    """Load the model of transformers into this process."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    del model.model.text_model, model.lm_head
    processor: Any = transformers.AutoImageProcessor.from_pretrained(directory)  # type: ignore[no-untyped-call]
    for count in AT_ONCE:
        files = Pictures(7).make(count)
        pixels = [_pixels(processor, [file]) for file in files]
        batch = torch.cat(pixels)
        _encodes[PEER, count] = partial(_each, [[file] for file in files], partial(_file_rows, model, processor))
        _encodes[PEER_TOWER, count] = partial(_each, pixels, partial(_rows, model))
        if count > 1:
            _encodes[PEER_BATCH, count] = partial(_file_rows, model, processor, files)
            _encodes[PEER_TOWER_BATCH, count] = partial(_rows, model, batch)


def _each(inputs: Sequence[Any], encode: Callable[[Any], object]) -> None:
    for one in inputs:
        encode(one)


def _pixels(processor: Any, files: Sequence[bytes]) -> torch.Tensor:
    """The pixels of files [file, 1, colour, y, x]."""
    images = [[Image.open(BytesIO(file)).convert("RGB")] for file in files]
    pixels: torch.Tensor = processor(images=images, return_tensors="pt")["pixel_values"]
    return pixels


def _file_rows(model: Any, processor: Any, files: Sequence[bytes]) -> object:
    return _rows(model, _pixels(processor, files))


def _rows(model: Any, pixels: torch.Tensor) -> object:
    with torch.inference_mode():
        return model.get_image_features(pixel_values=pixels)


def measure_here(variant: str, at_once: int, seconds: float) -> tuple[float, float]:
    """Pictures that this process encodes in a second, and the CPU seconds of each, over all threads."""
    encode = _encodes[variant, at_once]
    encode()
    calls, began, cpu_began = 0, time.perf_counter(), time.process_time()
    while (took := time.perf_counter() - began) < seconds or not calls:
        encode()
        calls += 1
    return calls * at_once / took, (time.process_time() - cpu_began) / (calls * at_once)


VARIANTS: dict[str, Callable[[Path, int], None]] = {
    BATON: prepare_baton,
    PEER: prepare_peer,
    PEER_BATCH: prepare_peer,
    BATON_TOWER: prepare_baton,
    PEER_TOWER: prepare_peer,
    PEER_TOWER_BATCH: prepare_peer,
}


def measure_encoding(
    model_name: str, directory: Path, threads: int, repeats: int, seconds: float
) -> Iterator[EncodeCell]:
    """Measure every variant, for each number of pictures at once."""
    with ExitStack() as stack:
        processes: dict[Callable[[Path, int], None], ProcessPoolExecutor] = {
            load: stack.enter_context(_process(load, directory, threads)) for load in (prepare_baton, prepare_peer)
        }
        for repeat in range(repeats):
            for at_once in AT_ONCE:
                names = [name for name in VARIANTS if at_once > 1 or name not in (PEER_BATCH, PEER_TOWER_BATCH)]
                for name in measured_order(names, repeat):
                    rate, cpu_s = processes[VARIANTS[name]].submit(measure_here, name, at_once, seconds).result()
                    yield EncodeCell(
                        model=model_name,
                        variant=name,
                        at_once=at_once,
                        threads=threads,
                        repeat=repeat,
                        images_per_s=rate,
                        cpu_s=cpu_s,
                    )


def _process(load: Callable[[Path, int], None], directory: Path, threads: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=load, initargs=(directory, threads))
