"""The engine's own Prometheus metrics: the library keeps them in the registry of the process, under `trtllm_`."""

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import MetricsCollector12, MetricsCollector13
from baton.engines.trtllm.polls import Item

log = logging.getLogger(__name__)

PREFIX = "trtllm_"

T = TypeVar("T")


class EngineMetrics:
    """Tells the library's collector what happens, and the registry what it has counted."""

    def __init__(self, library: Library, model_name: str) -> None:
        self._log_request: Callable[[dict[object, object]], None] | None = None
        self._log_iteration: Callable[[Item], None] | None = None
        self._failed = False
        try:
            collector = library.metrics_collector(labels={"model_name": model_name, "engine_type": "trtllm"})
        except ValueError as error:  # the registry has them already, from another engine of this process
            log.warning("no metrics of the engine itself: %s", error)
            return
        if library.features.iteration_metrics:
            new = cast(MetricsCollector13, collector)
            self._log_request, self._log_iteration = new.log_request_metrics_dict, new.log_iteration_stats
        else:
            self._log_request = cast(MetricsCollector12, collector).log_metrics_dict

    def request_ended(self, told: dict[object, object]) -> None:
        """Count a request; what goes wrong with that is no harm to it."""
        if self._log_request is not None and told:
            self._count(self._log_request, told)

    def iterations(self, stats: list[Item]) -> None:
        """Count iterations."""
        if self._log_iteration is not None:
            for stat in stats:
                self._count(self._log_iteration, stat)

    def text(self) -> str:
        """Return everything, as Prometheus text. Any thread."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Own())
        return generate_latest(registry).decode()

    def _count(self, count: Callable[[T], None], what: T) -> None:
        try:
            count(what)
        except Exception as error:  # noqa: BLE001 - counting must not harm what is counted
            if not self._failed:
                self._failed = True
                log.warning("the engine's metrics cannot be kept: %r", error)


class _Own(Collector):
    """The metrics of the process that are the library's."""

    def collect(self) -> Iterable[Metric]:
        return (metric for metric in REGISTRY.collect() if metric.name.startswith(PREFIX))
