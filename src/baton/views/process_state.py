"""What the view knows of one process, and how browsers get it."""

from collections import Counter
from collections.abc import Iterable

from baton.config.settings import Settings
from baton.views.deployment import ProcessAddress
from baton.views.reports import About, ProcessInfo
from baton.views.traces import Hop

STARTING, UNREACHABLE, GONE = "starting", "unreachable", "gone"
NAMESPACE = "namespace"
# The last phase of a request that runs, as browsers group it.
IN_PHASE = {
    "submitted": "queued",
    "queued": "queued",
    "first_step": "prefill",
    "prefill_chunk": "prefill",
    "kv_offered": "moving",
    "kv_claimed": "moving",
    "kv_moved": "decode",
    "first_token": "decode",
    "forwarded": "forwarded",
    "pool_selected": "forwarded",
    "retried": "forwarded",
}

# A prefill worker that has the first token holds the KV until it has been taken.
HOLDS_KV = ("prefill", "first_token")

Json = dict[str, object]


class ProcessState:
    """One process. `after` is the last sequence that was read of its ended requests, None before the first read."""

    def __init__(self, address: ProcessAddress) -> None:
        self.address = address
        self.about: About | None = None
        self.problem: str | None = None
        self.failures = 0
        self.after: int | None = None
        self.gone_at_s: float | None = None
        self.sent: Json | None = None

    @property
    def name(self) -> str:
        """The name of the process, which is unique in the view."""
        return self.address.name

    @property
    def info(self) -> ProcessInfo:
        """Which process it is, as far as is known."""
        return self.about.process if self.about is not None else ProcessInfo(name=self.name, role=_role_of(self.name))

    @property
    def role(self) -> str:
        """The role of the process."""
        return self.info.role or _role_of(self.name)

    @property
    def health(self) -> str:
        """Its own state, or why there is none."""
        if self.gone_at_s is not None:
            return GONE
        if self.problem is not None:
            return UNREACHABLE
        return self.about.health if self.about is not None else STARTING

    @property
    def pool(self) -> str:
        """The name of its pool, by its namespace; "" if it is in the namespace of its deployment."""
        namespace = self.about.settings.get(NAMESPACE) if self.about is not None else None
        return pool_name(str(namespace), self.role) if namespace else ""

    def to_json(self, running: Iterable[Hop]) -> Json:
        """Return what the topology shows of the process; `running` are the requests that run there."""
        info = self.info
        about = self.about or About(process=info)
        load = about.load
        return {
            "name": self.name,
            "short": self.name.rpartition("/")[2],
            "deployment": self.address.deployment,
            "role": self.role,
            "pool": self.pool,
            "model": info.model,
            "engine": info.engine,
            "pid": info.pid,
            "host": info.host,
            "started_unix_s": info.started_unix_s,
            "health": self.health,
            "problem": self.problem,
            "in_flight": about.in_flight,
            "running": sum(rank.running for rank in load),
            "waiting": sum(rank.waiting for rank in load),
            "used_blocks": sum(rank.used_blocks for rank in load),
            "total_blocks": sum(rank.total_blocks for rank in load),
            "phases": Counter(map(_shown_phase, running)),
            "transfers": about.transfers,
            "last_error_us": max((each.unix_us for each in about.last_errors), default=0),
        }

    def details(self) -> Json:
        """Return what the panel of the process shows besides."""
        about = self.about
        return {
            "name": self.name,
            "url": self.address.url,
            "controllable": self.address.token is not None,
            "about": about,
            "problem": self.problem,
        }


def pool_name(namespace: str, role: str) -> str:
    """Return the name of the pool with that namespace, by the names that namespaces of pools have by default."""
    _, separator, pool = namespace.partition(f"-{role}-")
    return pool if separator else namespace.removeprefix(f"{Settings().namespace}-")


def _shown_phase(hop: Hop) -> str:
    """Return the phase of a request that runs, as browsers group it."""
    return "moving" if (hop.process_role, hop.phase) == HOLDS_KV else IN_PHASE.get(hop.phase, "prepare")


def _role_of(name: str) -> str:
    """Return the role in the name that `baton serve` gives a process."""
    role = name.rpartition("/")[2].partition("-")[0]
    return "aggregated" if role == "worker" else role
