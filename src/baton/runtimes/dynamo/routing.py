"""How the runtime's frontend selects workers, by our settings."""

from collections.abc import Mapping

from dynamo import _core

from baton.config.settings import Settings
from baton.errors import ConfigError, Unsupported

ROUTER_MODES = {
    "round-robin": _core.RouterMode.RoundRobin,
    "random": _core.RouterMode.Random,
    "power-of-two": _core.RouterMode.PowerOfTwoChoices,
    "least-loaded": _core.RouterMode.LeastLoaded,
    "direct": _core.RouterMode.Direct,
    "kv": _core.RouterMode.KV,
}


def router_config(settings: Settings) -> _core.RouterConfig:
    """Return the configuration of a frontend. Raises ConfigError for a policy file that the runtime does not accept."""
    affine = settings.session_affinity != "off"
    return _core.RouterConfig(
        ROUTER_MODES[settings.router],
        _kv_router_config(settings),
        active_decode_blocks_threshold=settings.busy_threshold or None,
        session_affinity_ttl_secs=settings.session_ttl_s if affine else None,
        session_affinity_mode=settings.session_affinity if affine else "hard",
    )


def selects_by_adapter(settings: Settings) -> bool:
    """Whether the frontend can send requests that name a LoRA adapter only to workers that have it.

    The runtime refuses to start with that and another mode, or with sessions that stay with a worker.
    """
    modes = {settings.router, settings.router_prefill, settings.router_decode}
    return modes <= {"auto", "round-robin", "random", "kv"} and settings.session_affinity == "off"


def _kv_router_config(settings: Settings) -> _core.KvRouterConfig:
    if not settings.router_policy:
        return _core.KvRouterConfig()
    try:
        return _core.KvRouterConfig(router_policy_config=settings.router_policy)
    except ValueError as error:
        raise ConfigError(f"--router-policy: {error}") from None


def refuse_missing_taints(request: object, taints: frozenset[str]) -> None:
    """Raise Unsupported for a request that requires a taint which this worker lacks.

    Only the KV router applies the constraints of a request; others send it anywhere.
    """
    constraints: object = request
    for key in ("routing", "routing_constraints", "required_taints"):
        constraints = constraints.get(key) if isinstance(constraints, Mapping) else None
    missing = set(constraints) - taints if isinstance(constraints, list) else set()
    if missing:
        raise Unsupported(
            f"nvext.routing_constraints.required_taints: this worker has no taint {', '.join(sorted(missing))}; the"
            " frontend selects workers by taints only with --router kv"
        )
