"""SGLang's own metrics as Prometheus text: its processes write files, its tokenizer manager counts in this process."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

PREFIX = "sglang:"


class EngineMetrics:
    """The metrics of one engine, from its start to `close`."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._others = _registered()

    def text(self) -> str:
        """Return every metric once. Any thread; reads files."""
        children = CollectorRegistry()
        if self.directory is not None and self.directory.is_dir():
            MultiProcessCollector(children, path=str(self.directory))  # type: ignore[no-untyped-call]
        page = CollectorRegistry()
        page.register(_Merged(children, REGISTRY))
        return generate_latest(page).decode()

    def close(self) -> None:
        """Unregister what the engine has registered in this process, so that another can start."""
        for collector in _registered() - self._others:
            REGISTRY.unregister(collector)


class _Merged(Collector):
    """The engine's metrics of several registries, each family once."""

    def __init__(self, *registries: CollectorRegistry) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                if not metric.name.startswith(PREFIX):
                    continue
                if metric.name in families:
                    families[metric.name].samples += metric.samples
                else:
                    families[metric.name] = metric
        yield from families.values()


def _registered() -> set[Collector]:
    return set(REGISTRY._collector_to_names)
