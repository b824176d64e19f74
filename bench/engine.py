"""`python -m bench.engine`: the built-in engine next to its peers on a CPU, in the same run.

Every round starts each engine once, one after the other, so that other load on the machine affects all of
them alike. A missing or failed peer is reported as such. Speed is reported, never asserted.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import tokenizers

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.models.directory import resolve_model
from bench.engine_prompts import Encode, make_prompts
from bench.engine_report import (
    PREFILL_CELL,
    Decode,
    EngineResults,
    Sizes,
    agreements,
    decode_cell,
    to_markdown,
)
from bench.engine_runs import (
    CellSpec,
    EngineSetup,
    EngineUnderTest,
    Run,
    Spec,
    run_engine,
    select_engines,
    without_paths,
)
from bench.result_files import describe_machine, git_commit, source_digest

QUICK = Sizes(batches=(1, 4), new_tokens=16, prefill_tokens=200, rounds=1, repeats=1)
PROFILED_BATCHES = (1, 8)
WARM_TOKENS = 4
KV_ROUNDING = 1024
# Seeds of prompts, far enough apart that no two cells share a prompt.
CELL_SEEDS = 10_000
WARM_SEED = 5_000


def make_cells(sizes: Sizes, encode: Encode) -> list[CellSpec]:
    """The cells of a run. No prompt occurs twice, so that no engine can use a prefix cache."""
    plans = [(decode_cell(batch), batch, sizes.prompt_tokens, sizes.new_tokens, 1) for batch in sizes.batches]
    plans.append((PREFILL_CELL, 1, sizes.prefill_tokens, 1, 2))
    return [
        CellSpec(
            name=name,
            new_tokens=new_tokens,
            warm=make_prompts(encode, batch, length, number * CELL_SEEDS + WARM_SEED),
            runs=[
                make_prompts(encode, batch, length, number * CELL_SEEDS + turn * batch)
                for turn in range(times * sizes.repeats)
            ],
        )
        for number, (name, batch, length, new_tokens, times) in enumerate(plans, start=1)
    ]


def make_spec(engine: EngineUnderTest, sizes: Sizes, cells: list[CellSpec], options: argparse.Namespace) -> Spec:
    """The same work and KV capacity for every engine: enough for the largest batch and one long prompt."""
    row = sizes.prompt_tokens + sizes.new_tokens
    needed = max(sizes.batches) * row + sizes.prefill_tokens
    home = options.peers / engine.home
    return Spec(
        peer=engine.peer,
        packages=engine.packages,
        cells=cells,
        warm_tokens=WARM_TOKENS,
        setup=EngineSetup(
            model=str(options.model),
            gguf=str(options.peers / "models" / engine.gguf) if engine.gguf else "",
            cache=str((home / "cache").resolve()) if engine.home else "",
            variant=engine.variant,
            threads=options.threads,
            kv_tokens=-(-needed // KV_ROUNDING) * KV_ROUNDING,
            max_batch=max(sizes.batches),
            context=-(-max(row, sizes.prefill_tokens + 1) // KV_ROUNDING) * KV_ROUNDING,
        ),
    )


def run_rounds(
    engines: Sequence[EngineUnderTest], sizes: Sizes, cells: list[CellSpec], options: argparse.Namespace
) -> Iterator[Run]:
    """Yield every run as it ends, so that an interrupted benchmark keeps its results so far."""
    for turn in range(sizes.rounds):
        start = turn % len(engines)
        for engine in (*engines[start:], *engines[:start]):
            missing = engine.missing(options.peers)
            if missing:
                run = Run(engine=engine.name, round=turn, failure=missing)
            else:
                spec = make_spec(engine, sizes, cells, options)
                run = run_engine(engine.name, turn, engine.python(options.peers), spec, options.deadline)
            print_progress(run)
            yield run


def print_progress(run: Run) -> None:
    if run.measured is None:
        summary = run.failure
    else:
        rates = ", ".join(
            f"{name} {max(rate.prefill if name == PREFILL_CELL else rate.decode for rate in rates):.0f}"
            for name, rates in run.measured.cells.items()
        )
        summary = f"ready {run.measured.ready_s:.1f} s, {rates} tok/s, {run.measured.peak_bytes / 1e9:.2f} GB"
    print(
        f"round {run.round} {run.engine:24} {summary}  (others {run.foreign_cores:.1f} cores)",
        file=sys.stderr,
        flush=True,
    )


def run_and_write(options: argparse.Namespace, tokenizer: tokenizers.Tokenizer) -> int:
    """Run and write the results, also after an interrupt; return 0 if every engine ran in every round."""
    sizes: Sizes = options.sizes
    cells = make_cells(sizes, encoder(tokenizer))
    runs: list[Run] = []
    source = source_digest()
    try:
        for run in run_rounds(options.engines, sizes, cells, options):
            runs.append(run)
    finally:
        if runs:
            results = describe_run(runs, options, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
            write_results(msgspec.structs.replace(results, source_changed=source_digest() != source), options.out)
    return 1 if any(run.failure for run in runs) else 0


def describe_run(runs: list[Run], options: argparse.Namespace, decode: Decode) -> EngineResults:
    return EngineResults(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        command=command_of(options),
        source_changed=False,
        threads=options.threads,
        sizes=options.sizes,
        machine=describe_machine(),
        runs=[without_outputs(run) for run in runs],
        agreement=agreements(runs, decode),
    )


def without_outputs(run: Run) -> Run:
    """Drop the outputs: they have been compared, and thousands of token ids only enlarge the file."""
    if run.measured is None:
        return run
    return msgspec.structs.replace(run, measured=msgspec.structs.replace(run.measured, outputs={}))


def write_results(results: EngineResults, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "engine.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (out / "engine.md").write_text(to_markdown(results))


def write_profile(options: argparse.Namespace, tokenizer: tokenizers.Tokenizer) -> None:
    """Profile Baton's engine (bf16, or the one of `--only`) and write engine-profile.txt."""
    from bench.engine_profile import PASSES, profile_cells  # needs torch

    sizes = msgspec.structs.replace(options.sizes, batches=PROFILED_BATCHES, repeats=PASSES)
    cells = make_cells(sizes, encoder(tokenizer))
    spec = make_spec(options.engines[0], sizes, cells, options)
    text = profile_cells(spec.setup, cells, WARM_TOKENS)
    options.out.mkdir(parents=True, exist_ok=True)
    title = (
        f"# Where the time of {options.engines[0].name} goes\n\n{command_of(options)}, {options.threads} threads\n\n"
    )
    (options.out / "engine-profile.txt").write_text(title + text)


def encoder(tokenizer: tokenizers.Tokenizer) -> Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def command_of(options: argparse.Namespace) -> str:
    return without_paths(shlex.join(["python", "-m", "bench.engine", *options.arguments]))


def parse_sizes(options: argparse.Namespace) -> Sizes:
    changed = {
        "batches": options.batches,
        "new_tokens": options.new_tokens,
        "prefill_tokens": options.prefill_tokens,
        "rounds": options.rounds,
        "repeats": options.repeats,
    }
    base = QUICK if options.quick else Sizes()
    return msgspec.structs.replace(base, **{name: value for name, value in changed.items() if value is not None})


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def comma_separated_counts(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def comma_separated_engines(text: str) -> list[EngineUnderTest]:
    try:
        return select_engines(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that everything runs")
    parser.add_argument(
        "--only", type=comma_separated_engines, dest="engines", metavar="A,B", help="engines, by name or prefix"
    )
    parser.add_argument("--model", default="smollm2", help="model directory or demo model (default: smollm2)")
    parser.add_argument(
        "--peers", type=Path, default=Path(".bench"), help="folder that scripts/bench-peers.sh installs into"
    )
    parser.add_argument(
        "--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all cores of the CPU affinity"
    )
    parser.add_argument("--batches", type=comma_separated_counts, metavar="N,N", help="rows that decode in one batch")
    parser.add_argument("--new-tokens", type=positive, help="tokens that each row generates; at least 2")
    parser.add_argument("--prefill-tokens", type=positive, help="length of the long prompt")
    parser.add_argument("--rounds", type=positive, help="how often each engine is started")
    parser.add_argument("--repeats", type=positive, help="how often each cell is measured in a round")
    parser.add_argument(
        "--deadline", type=float, default=900.0, metavar="S", help="seconds after which an engine is killed"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--profile", action="store_true", help="only profile Baton's engine")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    options.engines = options.engines or select_engines([])
    options.sizes = parse_sizes(options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    # Exit by exception, so that child processes are stopped; the default action would leave them running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        options.model = resolve_model(options.model, cache_directory(Settings()) / "models")
        tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if options.profile:
        write_profile(options, tokenizer)
        return 0
    return run_and_write(options, tokenizer)


if __name__ == "__main__":
    sys.exit(main())
