"""`python -m bench.diffusion`: block diffusion with smoldiff, next to left-to-right decoding of the same shape.

Both run in the built-in engine, in this process, one after the other in every round. Speed is reported, never asserted.
"""

import argparse
import asyncio
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.models.directory import resolve_model
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.outputs import TokenDelta
from baton.protocol.requests import DiffusionOptions, Remasking, Sampling, StopConditions
from bench.diffusion_report import LEFT_TO_RIGHT, DiffusionCell, DiffusionResults, to_markdown
from bench.engine import comma_separated_counts, positive
from bench.engine_runs import without_paths
from bench.path import busy_core_s
from bench.result_files import describe_machine, git_commit, source_digest
from tools.smoldiff.problems import Problem, held_out_problems, is_right

MODEL = "smoldiff"
LONGEST_BLOCK = 32
KV_BLOCKS = 512
CONTEXT = 1024
SPARE_TOKENS = 16


class Variant(NamedTuple):
    """A way to decode; `options` is None for left to right."""

    name: str
    options: DiffusionOptions | None


def variants() -> list[Variant]:
    """Return left-to-right decoding, and block diffusion with one option changed at a time."""
    static, dynamic = Remasking.STATIC, Remasking.DYNAMIC
    return [
        Variant(LEFT_TO_RIGHT, None),
        *(
            Variant(
                f"static, block {length}, {steps} steps",
                DiffusionOptions(remasking=static, block_length=length, steps=steps),
            )
            for length, steps in ((16, 16), (16, 4), (16, 2))
        ),
        *(
            Variant(
                f"dynamic, block {length}, threshold {threshold:g}",
                DiffusionOptions(remasking=dynamic, block_length=length, threshold=threshold),
            )
            for length, threshold in ((4, 0.9), (8, 0.9), (16, 0.9), (32, 0.9), (16, 0.5), (16, 0.7), (16, 0.99))
        ),
    ]


class Question(NamedTuple):
    """A problem with the tokens of its prompt, and the tokens of its right answer with the end token."""

    problem: Problem
    prompt: tuple[int, ...]
    answer_tokens: int


def make_questions(tokenizer: HubTokenizer, count: int) -> list[Question]:
    """Return the first `count` problems of each kind that training never had."""
    return [
        Question(
            problem,
            tuple(tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": problem.text}]))),
            len(tokenizer.encode(problem.answer)) + 1,
        )
        for problem in held_out_problems(count)
    ]


def write_left_to_right(smoldiff: Path, directory: Path) -> Path:
    """Write a Qwen3 of the same tensors to `directory`; return it."""
    config = json.loads((smoldiff / "config.json").read_text())
    changes = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (directory / "config.json").write_text(json.dumps(config | changes))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(smoldiff / name)
    return directory


class Answer(NamedTuple):
    """The tokens of a question's answer, those after its first event with the seconds they took, and if it is right."""

    tokens: int
    later_tokens: int
    later_seconds: float
    right: bool


class Bench:
    """Both engines, started; one event loop, which runs while a cell is measured."""

    def __init__(self, smoldiff: Path, left_to_right: Path, device: str, threads: int) -> None:
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._names = itertools.count()
        self._tokenizer = HubTokenizer(smoldiff)
        options = TorchOptions(
            device=device,
            threads=threads,
            context=CONTEXT,
            block_size=LONGEST_BLOCK,
            blocks=KV_BLOCKS,
            prefix_cache=False,
        )
        self._engines = {
            True: TorchEngine(options, smoldiff, MODEL),
            False: TorchEngine(options, left_to_right, LEFT_TO_RIGHT),
        }
        self._readers = [self._loop.run(self._start(engine)) for engine in self._engines.values()]

    def close(self) -> None:
        for engine in self._engines.values():
            self._loop.run(engine.stop())
        self._loop.close()

    def questions(self, count: int) -> list[Question]:
        """Return the questions of a cell."""
        return make_questions(self._tokenizer, count)

    def measure(self, variant: Variant, questions: Sequence[Question], at_once: int, number: int) -> DiffusionCell:
        """Ask all questions, `at_once` of them at any time."""
        engine = self._engines[variant.options is not None]
        busy, cpu = busy_core_s(), time.process_time()
        passes, began = engine.progress().steps, time.monotonic()
        answers = self._loop.run(self._ask_all(variant, questions, at_once))
        seconds = time.monotonic() - began
        foreign_s = (busy_core_s() - busy) - (time.process_time() - cpu)
        return DiffusionCell(
            variant=variant.name,
            at_once=at_once,
            round=number,
            tokens=sum(answer.tokens for answer in answers),
            seconds=seconds,
            later_tokens=sum(answer.later_tokens for answer in answers),
            later_seconds=sum(answer.later_seconds for answer in answers),
            passes=engine.progress().steps - passes,
            answers=len(answers),
            right=sum(answer.right for answer in answers),
            foreign_cores=max(0.0, foreign_s / seconds),
        )

    async def _start(self, engine: TorchEngine) -> asyncio.Task[None]:
        await engine.start()
        return asyncio.create_task(drain(engine))  # a worker publishes the readings; here they are discarded

    async def _ask_all(self, variant: Variant, questions: Sequence[Question], at_once: int) -> list[Answer]:
        waiting = iter(questions)
        answers: list[Answer] = []

        async def ask_some() -> None:
            for question in waiting:
                answers.append(await self._ask(variant, question))

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(ask_some())
        return answers

    async def _ask(self, variant: Variant, question: Question) -> Answer:
        engine = self._engines[variant.options is not None]
        stream = engine.submit(self._work(variant, question))
        tokens: list[int] = []
        events: list[tuple[float, int]] = []
        while outputs := await stream.read():
            for output in outputs:
                if isinstance(output, TokenDelta):
                    tokens += output.token_ids
                    events.append((time.monotonic(), len(tokens)))
        decoder = self._tokenizer.decoder()
        right = is_right(question.problem, decoder.push(tokens) + decoder.flush())
        (first_at, first), (last_at, last) = events[0], events[-1]
        return Answer(last, last - first, last_at - first_at, right)

    def _work(self, variant: Variant, question: Question) -> Work:
        diffusion = variant.options
        limit = question.answer_tokens + (SPARE_TOKENS if diffusion is not None else 0)
        return Work(
            request_id=RequestId(f"bench-{next(self._names)}"),
            token_ids=question.prompt,
            max_tokens=limit,
            stop=StopConditions(max_tokens=limit, ignore_eos=diffusion is None),
            sampling=Sampling(temperature=0.0),
            diffusion=diffusion if diffusion is not None else DiffusionOptions(),
        )


async def drain(engine: TorchEngine) -> None:
    async for _ in engine.readings():
        pass


@contextmanager
def running_bench(device: str, threads: int) -> Iterator[Bench]:
    smoldiff = resolve_model(MODEL, Path())
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(smoldiff, write_left_to_right(smoldiff, Path(directory)), device, threads)
        try:
            yield bench
        finally:
            bench.close()


def run(options: argparse.Namespace) -> list[DiffusionCell]:
    """Measure all variants in every round; the first of a round is another one each time."""
    cells: list[DiffusionCell] = []
    with running_bench(options.device, options.threads) as bench:
        questions, some = bench.questions(options.problems), bench.questions(1)
        ways = variants()
        for at_once, variant in itertools.product(options.at_once, ways):
            bench.measure(variant, some, at_once, -1)  # warm
        for number in range(options.rounds):
            start = number % len(ways)
            for at_once, variant in itertools.product(options.at_once, (*ways[start:], *ways[:start])):
                cells.append(bench.measure(variant, questions, at_once, number))
                print_progress(cells[-1])
    names = [variant.name for variant in ways]
    return sorted(cells, key=lambda cell: (cell.at_once, names.index(cell.variant), cell.round))


def print_progress(cell: DiffusionCell) -> None:
    print(
        f"round {cell.round} {cell.at_once} at once {cell.variant:36} {cell.tokens_per_s:8.0f} tok/s"
        f" {cell.passes_per_token:.3f} passes per token, {cell.right} of {cell.answers} right"
        f"  (others {cell.foreign_cores:.1f} cores)",
        file=sys.stderr,
        flush=True,
    )


def write_results(results: DiffusionResults, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = f"diffusion-{results.gpu.lower().replace(' ', '-')}" if results.gpu else "diffusion"
    (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (out / f"{name}.md").write_text(to_markdown(results))


def gpu_name(device: str) -> str:
    """Return the name of the GPU, "" for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device != "cpu" else ""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.diffusion", description=__doc__)
    parser.add_argument("--problems", type=positive, default=8, help="of each kind, in every cell")
    parser.add_argument("--at-once", type=comma_separated_counts, default=(1, 8), metavar="N,N")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all cores of the CPU affinity"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    source = source_digest()
    cells = run(options)
    results = DiffusionResults(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        command=without_paths(shlex.join(["python", "-m", "bench.diffusion", *options.arguments])),
        source_changed=source_digest() != source,
        gpu=gpu_name(options.device),
        threads=options.threads,
        problems=max(cell.answers for cell in cells),
        machine=describe_machine(),
        cells=cells,
    )
    write_results(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
