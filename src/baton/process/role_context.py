"""What a role is built from."""

from typing import NamedTuple

from baton.config.settings import Settings
from baton.ports.engine import Engine, EngineInfo
from baton.request.tracker import RequestTracker


class RoleContext(NamedTuple):
    """What a role is built from: a running engine, a tracker for clients, and one for probes, which always admits."""

    settings: Settings
    engine: Engine
    info: EngineInfo
    tracker: RequestTracker
    probe_tracker: RequestTracker
