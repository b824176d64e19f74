"""The models that the deployment serves, and those that it has served: their workers may be restarting."""

import logging
from collections.abc import Iterable

import msgspec

from baton.edge.errors import Problem
from baton.edge.messages import Request
from baton.edge.routes import Frontend, Json
from baton.errors import BatonError

log = logging.getLogger(__name__)

LISTED = 20
"""How many names an error lists."""


class KnownModels:
    """Remembers models for `remember_s` after they were last listed, and `configured` ones for ever.

    A model that is no longer listed was withdrawn (an adapter that was unloaded) if every worker that was there before
    still is. Otherwise its workers may be restarting.
    """

    def __init__(self, configured: Iterable[str], remember_s: float) -> None:
        self._configured = frozenset(configured)
        self._remember_s = remember_s
        self._seen: dict[str, tuple[float, frozenset[int]]] = {}
        self._served: tuple[str, ...] = ()
        self._workers: frozenset[int] = frozenset()

    async def refresh(self, frontend: Frontend, now: float) -> None:
        """Read the lists of the frontend. Without an answer everything stays as it was."""
        try:
            status, models = await frontend.fetch("/v1/models")
            _, health = await frontend.fetch("/health")
        except BatonError as error:
            log.debug("cannot list models: %s", error.message)
            return
        if status == 200:
            self.update(_names(models), _workers(health), now)

    def update(self, served: tuple[str, ...], workers: frozenset[int], now: float) -> None:
        """Note which models and workers there are now."""
        self._served = served
        self._workers = workers
        self._seen.update(dict.fromkeys(served, (now, workers)))
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[0] <= self._remember_s}

    async def explain_missing(self, request: Request, frontend: Frontend, now: float) -> Problem | None:
        """Return the problem of a request whose model the frontend does not find, None if it names no model."""
        model = _model_of(request.body)
        if model is None:
            return None
        await self.refresh(frontend, now)
        return self.missing(model, request.path)

    def missing(self, model: str, path: str) -> Problem:
        """Return the problem of a request for `model` at `path`, for which there are no workers."""
        if model in self._served:
            message = f"the model {model!r} does not serve {path}"
            return Problem(status=404, message=message, code="model_not_found", param="model")
        if model in self._configured or self._lost_workers(model):
            message = f"the model {model!r} has no worker at the moment; its workers are starting or restarting"
            return Problem(status=503, message=message, code="model_unavailable", param="model", retry_after_s=2)
        names = ", ".join(repr(name) for name in self._served[:LISTED])
        more = f" and {len(self._served) - LISTED} more" if len(self._served) > LISTED else ""
        served = f"this deployment serves {names}{more}" if names else "this deployment serves no model at the moment"
        message = f"the model {model!r} does not exist: {served}"
        return Problem(status=404, message=message, code="model_not_found", param="model")

    def _lost_workers(self, model: str) -> bool:
        """Whether a worker has gone since `model` was last listed."""
        return model in self._seen and not self._seen[model][1] <= self._workers


def _model_of(body: bytes) -> str | None:
    try:
        model = msgspec.json.decode(body, type=Json).get("model")
    except (msgspec.DecodeError, RecursionError):
        return None
    return model[:256] if isinstance(model, str) else None


def _names(body: bytes) -> tuple[str, ...]:
    return tuple(str(entry["id"]) for entry in _entries(body, "data") if "id" in entry)


def _workers(body: bytes) -> frozenset[int]:
    ids = [entry.get("instance_id") for entry in _entries(body, "instances")]
    return frozenset(each for each in ids if isinstance(each, int))


def _entries(body: bytes, key: str) -> list[Json]:
    try:
        entries = msgspec.json.decode(body, type=Json).get(key)
    except msgspec.DecodeError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
