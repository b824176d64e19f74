"""The results of the reliability run, as a table."""

import msgspec

EXPECTED_ENDS = ("completed", "cancelled", "refused")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in one layout; pairs are from before and after the faults."""

    layout: str
    date: str
    commit: str
    machine: str
    requests: int
    seconds: float
    outcomes: dict[str, int]
    wrong: list[str]
    hung: int
    longest_gap_s: float
    faults: dict[str, int]
    held: dict[str, float]
    processes: tuple[int, int]
    segments: tuple[int, int]
    descriptors: tuple[int, int]
    memory_mib: tuple[float, float]

    @property
    def accounted(self) -> int:
        """The requests whose end is known."""
        return sum(self.outcomes.values())

    @property
    def errors(self) -> int:
        """The requests that ended in a typed error."""
        return sum(count for name, count in self.outcomes.items() if name.startswith("error"))

    @property
    def is_clean(self) -> bool:
        """Whether every request is accounted for, no text is wrong, and nothing is left."""
        return (
            self.accounted == self.requests
            and not self.wrong
            and not self.hung
            and not any(self.held.values())
            and self.processes[0] == self.processes[1]
        )

    def line(self) -> str:
        """Return the run in one line."""
        left = f"wrong {len(self.wrong)}, hung {self.hung}, held {self.held}"
        return f"{self.layout}: {self.outcomes}, {left}, {self.faults}"


CONDITIONS = """\
Tiny torch model in float32, 16 clients at once; half of the responses streamed, 10 % of the clients disconnect
within half a second, 3 % send invalid requests, 2 % read slowly. Meanwhile a random worker is killed every 20 s,
one is frozen, and the TCP connections of one are cut; with etcd, etcd is away for 3 s. Every text is compared with
that of an undisturbed worker. Errors are typed: 503, or 404 and 500 where no worker of a role is left. Pairs are
before and after the faults; each worker has been replaced in between, and a new process has loaded less than one
that has served.
"""


def to_markdown(runs: list[Run]) -> str:
    """Return the page for `bench/results/`."""
    rows = [_row(run) for run in runs]
    return "\n".join(
        [
            "# Reliability",
            "",
            f'`make reliability ARGS="--requests {max(run.requests for run in runs)}"`.',
            "",
            CONDITIONS,
            "| " + " | ".join(rows[0]) + " |",
            "|" + "---|" * len(rows[0]),
            *("| " + " | ".join(row.values()) + " |" for row in rows),
            "",
        ]
    )


def _row(run: Run) -> dict[str, str]:
    return {
        "": run.layout,
        **{name: str(run.outcomes.get(name, 0)) for name in EXPECTED_ENDS},
        "errors": str(run.errors),
        "accounted for": f"{run.accounted} of {run.requests}",
        "wrong texts": str(len(run.wrong)),
        "hung": str(run.hung),
        "blocks, rooms, requests left": ", ".join(f"{count:g}" for count in run.held.values()),
        "processes": _pair(run.processes),
        "segments": _pair(run.segments),
        "descriptors": _pair(run.descriptors),
        "private memory, MiB": f"{run.memory_mib[0]:.0f} to {run.memory_mib[1]:.0f}",
        "longest gap, s": f"{run.longest_gap_s:.1f}",
        "faults": ", ".join(f"{count} {name}" for name, count in sorted(run.faults.items())),
        "seconds": f"{run.seconds:.0f}",
        "measured": f"{run.date}, {run.commit}, {run.machine}",
    }


def _pair(values: tuple[int, int]) -> str:
    return f"{values[0]} to {values[1]}"
