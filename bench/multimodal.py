"""`python -m bench.multimodal`: requests with images, with and without a separate encode worker, and the encoder alone.

    alone    one request at a time: first token all in one and with an encode worker, embedding caches cold and warm;
             time of the transfer of embeddings against that of encoding, for each transport
    mixed    text streams decode while pictures arrive: two aggregated workers, or one encode and one PD worker
    encode   pictures per second of the encoder, and of the same tower in transformers

Systems alternate. Speed is reported, never asserted.
"""

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.models.demo import DEMOS, prepare_demo
from bench.multimodal_encode import measure_encoding
from bench.multimodal_load import measure_alone, measure_mixed
from bench.multimodal_model import make_larger_tower
from bench.multimodal_report import EncodeCell, MixedCell, MultimodalResults, RequestCell, to_markdown
from bench.result_files import describe_machine, git_commit, source_digest
from bench.transfer import transports_here

PARTS = ("alone", "mixed", "encode")
Cell = RequestCell | MixedCell | EncodeCell


@dataclass(frozen=True)
class Plan:
    requests: int = 12
    """Repeats of each request that is sent alone."""
    rounds: int = 3
    """How often the systems of the mixed load are started."""
    seconds: float = 30.0
    """How long each mixed load lasts."""
    encode_repeats: int = 5
    encode_seconds: float = 2.0


QUICK = Plan(requests=2, rounds=1, seconds=6.0, encode_repeats=1, encode_seconds=0.5)


def run(plan: Plan, parts: Sequence[str], smolsee: Path, larger: Path) -> Iterator[Cell]:
    """Yield every cell as it is measured, so that an interrupted run keeps its results so far."""
    models = {"smolsee": smolsee, "larger": larger}
    if "encode" in parts:
        for name, directory in models.items():
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                yield from measure_encoding(name, directory, threads, plan.encode_repeats, plan.encode_seconds)
    if "alone" in parts:
        for name, directory in models.items():
            yield from measure_alone(name, directory, transports_here(), plan.requests)
    if "mixed" in parts:
        yield from measure_mixed(larger, plan.rounds, plan.seconds)


def results_of(cells: Sequence[Cell], source_changed: bool) -> MultimodalResults:
    return MultimodalResults(
        date=time.strftime("%Y-%m-%d"),
        commit=git_commit(),
        command=f'make bench-multimodal ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else "make bench-multimodal",
        source_changed=source_changed,
        machine=describe_machine(),
        requests=[cell for cell in cells if isinstance(cell, RequestCell)],
        mixed=[cell for cell in cells if isinstance(cell, MixedCell)],
        encoding=[cell for cell in cells if isinstance(cell, EncodeCell)],
    )


def write(results: MultimodalResults, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "multimodal.json").write_bytes(msgspec.json.encode(results))
    text = to_markdown(results)
    (out / "multimodal.md").write_text(text)
    print(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.multimodal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="each measurement once or twice, to check that all runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--requests", type=int, help="repeats of each request that is sent alone")
    parser.add_argument("--rounds", type=int, help="how often the systems of the mixed load are started")
    parser.add_argument("--seconds", type=float, help="how long each mixed load lasts")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    return parser.parse_args(arguments)


def chosen_plan(options: argparse.Namespace) -> Plan:
    given = {name: getattr(options, name) for name in ("requests", "rounds", "seconds")}
    return dataclasses.replace(
        QUICK if options.quick else Plan(), **{name: value for name, value in given.items() if value}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit by exception, so that child processes are stopped
    source = source_digest()
    smolsee = prepare_demo(DEMOS["smolsee"], cache_directory(Settings()) / "models")
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as directory:
        larger = make_larger_tower(smolsee, Path(directory) / "larger")
        try:
            for cell in run(chosen_plan(options), options.parts, smolsee, larger):
                cells.append(cell)
                print(describe(cell), flush=True)
        finally:
            if cells:
                write(results_of(cells, source_digest() != source), options.out)
    return 0


def describe(cell: Cell) -> str:
    """One line about a cell."""
    match cell:
        case RequestCell():
            return f"{cell.model} {cell.system} {cell.images} images {cell.cache}: {1000 * cell.first_s:.0f} ms"
        case MixedCell():
            return f"round {cell.round + 1}: {cell.system} {cell.images_per_s:.1f} image requests/s"
        case EncodeCell():
            return f"{cell.model} {cell.variant}, {cell.at_once} at once: {cell.images_per_s:.1f} pictures/s"


if __name__ == "__main__":
    sys.exit(main())
