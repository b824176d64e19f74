"""Measures one peer: reads a spec as JSON from stdin, writes one JSON line to stdout, and imports only the peer.

ready     process start .......... first token of the first request
prefill   prompts submitted ...... first token                         prompt tokens / time
decode    last row's first token . first row's last token              tokens in between / time, all rows active
wall      prompts submitted ...... last row's last token               new tokens / time
"""

import importlib
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def timings(rows: list[Row], started: float, prompt_tokens: int) -> dict[str, float]:
    """The three rates of one run, in tokens per second; decode is 0 when rows have one token only."""
    first, last = [row["times"][0] for row in rows], [row["times"][-1] for row in rows]
    begin, end = max(first), min(last)
    between = sum(begin < moment <= end for row in rows for moment in row["times"])
    return {
        "prefill": prompt_tokens / (max(first) - started),
        "decode": between / (end - begin) if end > begin else 0.0,
        "wall": sum(len(row["times"]) for row in rows) / (max(last) - started),
    }


def run_cell(engine: Any, prompts: list[list[int]], new_tokens: int) -> tuple[dict[str, float], list[Row]]:
    started = time.monotonic()
    rows = engine.generate(prompts, new_tokens)
    short = [len(row["times"]) for row in rows if len(row["times"]) != new_tokens]
    if len(rows) != len(prompts) or short:
        raise RuntimeError(f"requested {len(prompts)} rows of {new_tokens} tokens, got {len(rows)}, wrong: {short}")
    return timings(rows, started, sum(map(len, prompts))), rows


def measure(engine: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Alternate between the cells, one run each, so that noise does not affect one cell alone."""
    for cell in spec["cells"]:
        engine.generate(cell["warm"], min(spec["warm_tokens"], cell["new_tokens"]))
    found: dict[str, list[dict[str, float]]] = {cell["name"]: [] for cell in spec["cells"]}
    outputs: dict[str, list[Row]] = {}
    for turn in range(max(len(cell["runs"]) for cell in spec["cells"])):
        for cell in spec["cells"]:
            if turn < len(cell["runs"]):
                rates, rows = run_cell(engine, cell["runs"][turn], cell["new_tokens"])
                found[cell["name"]].append(rates)
                outputs.setdefault(cell["name"], rows)
    return {"cells": found, "outputs": {name: [output_of(row) for row in rows] for name, rows in outputs.items()}}


def output_of(row: Row) -> Row:
    return {key: row[key] for key in ("tokens", "text") if key in row}


def process_tree(root: int) -> list[int]:
    """The process and all its running descendants."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may contain any character; the state and the parent follow it.
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def peak_bytes(pids: list[int]) -> int:
    """The sum of the peaks; pages shared by two processes count twice."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total


def versions(packages: list[str]) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


def main() -> None:
    spec = json.load(sys.stdin)
    # A peer's own output to stdout must not mix with the result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = importlib.import_module(spec["peer"]).load(spec["setup"])
    engine.generate([spec["cells"][0]["warm"][0]], 1)
    ready_s = time.monotonic() - spec["spawned_at"]
    found = measure(engine, spec)
    found |= {
        "ready_s": ready_s,
        "peak_bytes": peak_bytes(process_tree(os.getpid())),
        "versions": versions(spec["packages"]),
    }
    results.write(json.dumps(found) + "\n")
    results.flush()
    # The result is written, and some peers hang or take long at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
