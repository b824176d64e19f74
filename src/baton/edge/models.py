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
    """Remembers models for `remember_s` after they were last listed, and `configured` ones for ever."""

    def __init__(self, configured: Iterable[str], remember_s: float) -> None:
        self._configured = frozenset(configured)
        self._remember_s = remember_s
        self._seen: dict[str, float] = {}
        self._served: tuple[str, ...] = ()

    async def refresh(self, frontend: Frontend, now: float) -> None:
        """Read the list of the frontend. Without an answer everything stays as it was."""
        try:
            status, body = await frontend.fetch("/v1/models")
        except BatonError as error:
            log.debug("cannot list models: %s", error.message)
            return
        if status == 200:
            self.update(_names(body), now)

    def update(self, served: tuple[str, ...], now: float) -> None:
        """Note which models are served now."""
        self._served = served
        self._seen.update(dict.fromkeys(served, now))
        self._seen = {name: at for name, at in self._seen.items() if now - at <= self._remember_s}

    async def explain_missing(self, request: Request, frontend: Frontend, now: float) -> Problem | None:
        """Return the problem of a request whose model the frontend does not find, None if it names no model."""
        model = _model_of(request.body)
        if model is None:
            return None
        await self.refresh(frontend, now)
        return self.missing(model)

    def missing(self, model: str) -> Problem:
        """Return the problem of a request for `model`, which has no workers."""
        if model in self._configured or model in self._seen:
            message = f"the model {model!r} has no worker at the moment; its workers are starting or restarting"
            return Problem(status=503, message=message, code="model_unavailable", param="model", retry_after_s=2)
        names = ", ".join(repr(name) for name in self._served[:LISTED])
        more = f" and {len(self._served) - LISTED} more" if len(self._served) > LISTED else ""
        served = f"this deployment serves {names}{more}" if names else "this deployment serves no model at the moment"
        message = f"the model {model!r} does not exist: {served}"
        return Problem(status=404, message=message, code="model_not_found", param="model")


def _model_of(body: bytes) -> str | None:
    try:
        model = msgspec.json.decode(body, type=Json).get("model")
    except (msgspec.DecodeError, RecursionError):
        return None
    return model[:256] if isinstance(model, str) else None


def _names(body: bytes) -> tuple[str, ...]:
    try:
        entries = msgspec.json.decode(body, type=Json).get("data")
    except msgspec.DecodeError:
        return ()
    if not isinstance(entries, list):
        return ()
    return tuple(str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry)
