"""Fixtures that start Baton and see to it that it ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.harness import Serve, System, running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the end of the logs of what runs when a test fails."""
    report = yield
    if report.failed:
        for system in running:
            for name, tail in system.logs().items():
                report.sections.append((f"{system.directory.name}/{name}", tail))
    return report


def _starter(factory: pytest.TempPathFactory) -> Iterator[Callable[..., System]]:
    started: list[System] = []

    def start(kind: type[System], *arguments: str, **options: Any) -> System:
        directory = factory.mktemp(kind.__name__.lower())
        system = kind(directory, *arguments, **options)
        started.append(system)
        system.wait_ready()
        return system

    try:
        yield start
    finally:
        for system in started:
            system.close()


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., System]]:
    """Start a Serve or a Cluster for the tests of a module."""
    yield from _starter(tmp_path_factory)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., System]]:
    """Start a Serve or a Cluster for one test, which may break it."""
    yield from _starter(tmp_path_factory)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], request: pytest.FixtureRequest) -> Iterator[Serve]:
    """One `baton serve` for a module, with the flags in its SERVE; stopped with exit code 0 and nothing left."""
    serve = start_shared(Serve, *getattr(request.module, "SERVE", ()))
    yield serve
    serve.stop()
