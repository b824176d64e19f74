"""The library's Prometheus metrics: it keeps them in the registry of the process, under `trtllm_`."""

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import MetricsCollector12, MetricsCollector13
from baton.engines.trtllm.readings import Item

log = logging.getLogger(__name__)

PREFIX = "trtllm_"

T = TypeVar("T")


class EngineMetrics:
    """Reports requests and iterations to the library's collector, and reads its metrics."""

    def __init__(self, library: Library, model_name: str) -> None:
        self._log_request: Callable[[dict[object, object]], None] | None = None
        self._log_iteration: Callable[[Item], None] | None = None
        self._failed = False
        try:
            collector = library.metrics_collector(labels={"model_name": model_name, "engine_type": "trtllm"})
        except ValueError as error:  # another engine of this process has registered them
            log.warning("TensorRT-LLM's metrics do not count this engine: %s", error)
            return
        if library.features.iteration_metrics:
            new = cast(MetricsCollector13, collector)
            self._log_request, self._log_iteration = new.log_request_metrics_dict, new.log_iteration_stats
        else:
            self._log_request = cast(MetricsCollector12, collector).log_metrics_dict

    def request_ended(self, metrics: dict[object, object]) -> None:
        """Count a request. An error in counting does not fail the request."""
        if self._log_request is not None and metrics:
            self._count(self._log_request, metrics)

    def iterations(self, stats: list[Item]) -> None:
        """Count iterations."""
        if self._log_iteration is not None:
            for stat in stats:
                self._count(self._log_iteration, stat)

    def text(self) -> str:
        """Return all metrics as Prometheus text. Any thread."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_LibraryMetrics())
        return generate_latest(registry).decode()

    def _count(self, count: Callable[[T], None], values: T) -> None:
        try:
            count(values)
        except Exception as error:  # noqa: BLE001 - see `request_ended`
            if not self._failed:
                self._failed = True
                log.warning("TensorRT-LLM's metrics cannot be updated: %r", error)


class _LibraryMetrics(Collector):
    """Those metrics of the process that are the library's."""

    def collect(self) -> Iterable[Metric]:
        return (metric for metric in REGISTRY.collect() if metric.name.startswith(PREFIX))
