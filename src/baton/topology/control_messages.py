"""Messages of the control socket of `baton serve`: JSON, one in a line; a request, and replies up to a final one."""

import msgspec

Counts = dict[str, int]


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag="status", tag_field="command"):
    """Asks for the processes and addresses."""


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, tag="scale", tag_field="command"):
    """Sets the number of workers in some groups."""

    counts: Counts


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, tag="drain", tag_field="command"):
    """Takes a worker out of service when its requests have finished; with `restart`, starts it again."""

    worker: str
    restart: bool = False


Request = StatusRequest | ScaleRequest | DrainRequest


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `log` is the path of its log, "" for standard error; `url` is that of its system server."""

    name: str
    group: str
    pid: int | None
    state: str
    log: str
    url: str


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status", tag_field="kind"):
    """The reply to a status request, which is final. `counts` are the workers by group."""

    pid: int
    url: str
    models: tuple[str, ...]
    engine: str
    api_key: str | None
    counts: Counts
    processes: tuple[ProcessStatus, ...]


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", tag_field="kind"):
    """A line for people; more replies follow."""

    message: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", tag_field="kind"):
    """The request has been carried out."""

    message: str
    counts: Counts


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="kind"):
    """The request was refused or has failed; `code` is for programs."""

    code: str
    message: str


Reply = Status | Progress | Done | Failed


class OperationError(Exception):
    """What a `Failed` reply says. Codes: invalid_request, not_serving, busy, unknown_group, unknown_worker,
    last_worker, out_of_range, start_failed, forbidden."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
