"""Metrics of real deployments: promtool and docs/metrics.md know them all, and alerts fire when something breaks."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import Serve, eventually, fetch
from tests.e2e.pooled import Pooled
from tests.e2e.prometheus import Prometheus, prometheus_for
from tests.e2e.test_router import ECHO
from tests.monitoring_files import METRIC, dashboard_queries, needs_prometheus, promtool
from tools.metrics_page import series_names

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900), needs_prometheus]

CHAT = "/v1/chat/completions"
PREFILL, DECODE = 0, 1
FIRES_S = 60.0
NAMES = 1000
ELSEWHERE = ("router", "media", "rooms", "transfer")
"""Parts of the names of metrics that a deployment without routers, media and moved KV does not have."""

LAYOUTS: dict[str, Callable[[Callable[..., Any]], Serve]] = {
    "aggregated": lambda start: start(Serve),
    "disaggregated": lambda start: start(Serve, "--router", "kv", prefill=1, decode=1),
    "process workers": lambda start: start(Serve, "--process", "1", processors=1),
    "pools": lambda start: start(Pooled, ECHO, workers=2),
}


def chat(prompt: str = "hello there", tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, **more}


def scraped(system: Serve) -> dict[str, str]:
    """Return the metrics of each process that the frontend lists."""
    status, body = system.get("/metrics/targets")
    assert status == 200, body
    pages = {}
    for target in json.loads(body):
        [address] = target["targets"]
        status, pages[target["labels"]["process"]] = fetch(f"{target['labels']['__scheme__']}://{address}/metrics")
        assert status == 200
    return pages


def series(text: str) -> set[str]:
    """Return the series of a process, without those that come when the runtime first samples its own threads."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}"
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("dynamo_tokio_")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_promtool_and_the_documentation_know_every_metric_of_every_process(
    layout: str, start: Callable[..., Any]
) -> None:
    system = LAYOUTS[layout](start)
    for stream in (False, True):
        status, body = system.post(CHAT, chat(stream=stream))
        assert status == 200, body
    pages = scraped(system)
    assert len(pages) == system.workers + 1
    for process, text in pages.items():
        assert promtool("check", "metrics", text=text) == "", process
        shown = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        assert shown - series_names() == set(), process
        assert {"baton_build_info", "baton_process_info", "baton_process_restarts_total"} <= shown, process
    system.stop()


def test_a_thousand_names_in_requests_add_no_series(start: Callable[..., Any]) -> None:
    system = start(Serve)

    def ask(number: int) -> None:
        body = chat() | {"model": f"invented-{number}", "user": f"user-{number}"}
        headers = {"x-request-id": f"mine-{number}"}
        assert system.post(CHAT, body, headers)[0] == 404
        assert system.get(f"/v1/models/invented-{number}")[0] == 404
        assert system.get(f"/invented/{number}")[0] == 404

    ask(0)
    eventually(lambda: system.metric("baton_requests_in_flight") == 0, what="idle")
    before = {process: series(text) for process, text in scraped(system).items()}
    for number in range(1, NAMES):
        ask(number)
    after = {process: series(text) for process, text in scraped(system).items()}
    assert {process: after[process] - before[process] for process in after} == {process: set() for process in after}
    system.stop()


class Monitored:
    def __init__(self, system: Serve, prometheus: Prometheus) -> None:
        self.system = system
        self.prometheus = prometheus

    def fires(self, alert: str, **labels: str) -> None:
        """Wait until `alert` fires with these labels."""
        eventually(
            lambda: any(labels.items() <= each.items() for each in self.prometheus.firing(alert)),
            FIRES_S,
            f"{alert} fires",
        )

    def is_quiet(self, alert: str) -> None:
        """Wait until `alert` does not fire."""
        eventually(lambda: not self.prometheus.firing(alert), FIRES_S, f"{alert} is over")

    def all_up(self) -> None:
        """Wait until Prometheus reaches every process."""
        names = {"frontend": "up", "prefill-0": "up", "decode-0": "up"}
        eventually(lambda: self.prometheus.targets() == names, FIRES_S, "every process is scraped")


@pytest.fixture(scope="module")
def monitored(start_shared: Callable[..., Serve], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    system = start_shared(Serve, "--echo-faults", prefill=1, decode=1)
    with prometheus_for(system, tmp_path_factory.mktemp("prometheus")) as prometheus:
        monitored = Monitored(system, prometheus)
        monitored.all_up()
        yield monitored
    system.stop()


def test_the_queries_of_the_dashboard_have_data(monitored: Monitored) -> None:
    def ask_and_look() -> list[str]:
        assert monitored.system.post(CHAT, chat(tokens=20, stream=True))[0] == 200
        return [title for title, query in queries if not monitored.prometheus.query(query)]

    queries = [
        (title, query)
        for title, query in dashboard_queries(__rate_interval="10s")
        if not any(part in name for name in METRIC.findall(query) for part in ELSEWHERE)
        and title not in ("Errors by code", "Clients that left", "Queue", "Prefill")
    ]
    assert len(queries) > 20
    eventually(lambda: not ask_and_look(), FIRES_S, "every panel has data")


def test_nothing_fires_in_a_healthy_deployment(monitored: Monitored) -> None:
    assert monitored.system.post(CHAT, chat())[0] == 200
    monitored.all_up()
    [count] = monitored.prometheus.query('count(up{job="baton"} == 1)')
    assert count["value"][1] == "3"
    for alert in ("BatonProcessDown", "BatonProcessRestarts", "BatonEngineStalled", "BatonModelNotServed"):
        monitored.is_quiet(alert)


def test_a_stalled_engine_fires(monitored: Monitored) -> None:
    asking = threading.Thread(target=lambda: monitored.system.post(CHAT, chat("[[stall]]", 50)), daemon=True)
    asking.start()
    monitored.fires("BatonEngineStalled")
    asking.join(120)
    assert not asking.is_alive()
    monitored.all_up()
    monitored.is_quiet("BatonEngineStalled")


def test_a_frozen_worker_fires_and_is_over_when_the_supervisor_has_replaced_it(monitored: Monitored) -> None:
    monitored.system.worker(DECODE).send_signal(signal.SIGSTOP)
    monitored.fires("BatonProcessDown", process="decode-0")
    monitored.all_up()
    monitored.is_quiet("BatonProcessDown")


def test_a_worker_that_is_killed_again_and_again_fires(monitored: Monitored) -> None:
    system = monitored.system
    for _ in range(4):
        before = system.metric("baton_process_restarts_total", PREFILL)
        system.worker(PREFILL).kill()
        eventually(
            lambda last=before: system.metric("baton_process_restarts_total", PREFILL) > last,
            60,
            "it was started again",
        )
        eventually(lambda: monitored.prometheus.targets().get("prefill-0") == "up", 60, "Prometheus reaches it again")
    monitored.fires("BatonProcessRestarts", process="prefill-0")


def test_a_deployment_without_decode_workers_fires(monitored: Monitored, tmp_path: Path) -> None:
    monitored.all_up()
    eventually(lambda: monitored.system.post(CHAT, chat())[0] == 200, 60, "it serves")
    worker = monitored.system.worker(DECODE)
    worker.send_signal(signal.SIGSTOP)  # it leaves discovery without an end
    monitored.fires("BatonModelNotServed")
    monitored.all_up()
    monitored.is_quiet("BatonModelNotServed")
