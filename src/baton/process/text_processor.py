"""The process of the process role: tokenizer and chat template in front of language workers, on the skeleton of
`service_process.py`.

It has no engine. Its language workers are in a namespace of their own, where no frontend looks.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.config.settings import Settings
from baton.control.controller import Controller
from baton.control.http.schemas import Health, State
from baton.errors import ConfigError, EngineDead, PeerLost, Unsupported
from baton.handlers.probe import ProbeContext, read_to_end
from baton.handlers.process import ProcessHandler
from baton.health.canary import Canary
from baton.metrics.exposition import TimedScrape, join
from baton.metrics.worker import WorkerMetrics
from baton.models.tokenizer import HubTokenizer, HubTokenTexts
from baton.ports.runtime import Endpoint, ModelCard, ModelClient, Runtime, Service
from baton.process.location_service import serve_location, system_url
from baton.process.process_reports import ProcessReports, ProcessStatus
from baton.process.registration_watch import RegistrationWatch
from baton.process.roles import path_of
from baton.process.service_process import DISCOVERY_TIMEOUT_S, ServiceProcess, bounded, run_service
from baton.protocol.text import TextRequest, decode_text, encode_text
from baton.request.gate import Gate, GateState
from baton.request.tracker import RequestLimits, RequestTracker
from baton.runtimes.dynamo.model_client import DynamoModelClient
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.timelines.reports import AboutReply, TimelinesReply
from baton.timelines.ring import TimelineRing

log = logging.getLogger(__name__)

ROLE = "process"
SCRAPE_TIMEOUT_S = 3.0
END_TIMEOUT_S = 5.0
REGISTRATION_CHECKS = 2


def run_text_processor(settings: Settings) -> int:
    """Run a process worker until it is stopped; return its exit code. Its tokenizer has been prepared."""
    import uvloop

    async def build(settings: Settings) -> TextProcessor:
        runtime = DynamoRuntime(
            settings.runtime,
            publishes_metrics=True,
            reader_stall_timeout_s=settings.reader_stall_timeout_s,
            subscribes=True,
        )
        return TextProcessor(
            settings, runtime, DynamoModelClient(runtime, settings, settings.language_worker_namespace)
        )

    return uvloop.run(run_service(settings, build, settings.accepts_commands))


class TextProcessor:
    """One process worker, from start to stop. The system server may call it at any time."""

    def __init__(self, settings: Settings, runtime: Runtime, model: ModelClient) -> None:
        if settings.router == "direct":
            raise ConfigError("process workers select the language workers themselves: drop --router direct")
        self._settings = settings
        self._runtime = runtime
        self._model = model
        self._endpoint: Endpoint | None = None
        self._prober: ProcessHandler | None = None
        self._healthy = True
        self.observed = WorkerMetrics(ROLE, settings.first_name)
        self._reports = ProcessReports(settings, ROLE)
        self.gate = Gate(settings.max_in_flight)
        self.observed.in_flight.read(lambda: self.gate.in_flight)
        self._scrape = TimedScrape("the runtime", runtime.metrics, SCRAPE_TIMEOUT_S)
        self._canary_task: asyncio.Task[Any] | None = None
        self._process = ServiceProcess(
            "worker", runtime, self.gate, drain_timeout_s=settings.drain_timeout_s, end_timeout_s=END_TIMEOUT_S
        )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """See `Runnable.run`."""
        await self._process.run(self, stop, on_ready)

    # Called by the system server

    def health(self) -> Health:
        """See `Subject.health`."""
        state = self._state()
        return Health(
            ready=state == "serving",
            state=state,
            in_flight=self.gate.in_flight,
            model=self._settings.first_name,
            role=ROLE,
        )

    async def metrics(self) -> str:
        """See `Subject.metrics`."""
        return join([self.observed.render(), await self._scrape.text() if self._endpoint is not None else ""])

    def control(self) -> Controller | None:
        """See `Controlled.control`. It has no engine that takes commands: send them to the language workers."""
        raise Unsupported("a process worker has no engine; send commands to the language workers")

    def about(self) -> AboutReply:
        """See `Controlled.about`."""
        return self._reports.about(ProcessStatus(health=self._state(), in_flight=self.gate.in_flight))

    def timelines(self, after: int, limit: int) -> TimelinesReply:
        """See `Controlled.timelines`."""
        return self._reports.page(after, limit, None)

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """See `Controlled.count_command`."""

    def _state(self) -> State:
        if self._process.failed or self.gate.state is GateState.DRAINING:
            return "draining"
        if self._endpoint is None:
            return "starting"
        return "serving" if self._healthy else "unhealthy"

    # Called by the process skeleton

    async def start(self) -> None:
        """See `ServiceSteps.start`. It registers when there are language workers."""
        settings = self._settings
        directory = Path(settings.model)
        tokenizer = await asyncio.to_thread(HubTokenizer, directory, settings.chat_template)
        await self._runtime.start()
        await serve_location(self._runtime.serve, self._settings, "process", system_url(self._settings))
        await self._model.start()
        try:
            language = await self._model.ready(settings.start_timeout_s)
        except PeerLost as error:
            raise EngineDead(error.message) from None
        handler = _handler(settings, self._model, tokenizer, self._tracker(self.gate, ROLE, self._reports.timelines))
        endpoint = await self._runtime.serve(
            path_of(settings, ROLE), Service(handler.generate, decode_text, encode_text)
        )
        self._prober = _handler(settings, self._model, tokenizer, self._tracker(Gate(1), "canary"))
        await endpoint.register_model(_card(settings, language))
        self._endpoint = endpoint
        self.observed.healthy.set(True)
        log.info(
            "processing text for %s in front of %s",
            ", ".join(settings.served_names),
            settings.language_worker_namespace,
        )

    def _tracker(self, gate: Gate, role: str, timelines: TimelineRing | None = None) -> RequestTracker:
        limits = RequestLimits(request_timeout_s=self._settings.request_timeout_s)
        return RequestTracker(
            gate, limits, self.observed, role, self._process.fail, timelines, self.observed.token_gaps.observe
        )

    def start_guards(self) -> None:
        """See `ServiceSteps.start_guards`."""
        settings, endpoint = self._settings, self._endpoint
        assert endpoint is not None, "started"
        canary = Canary(
            self._probe,
            lambda: self.gate.in_flight > 0,
            self._set_healthy,
            settings.canary_interval_s,
            settings.canary_timeout_s,
            math.inf,  # a restart does not bring language workers back
        )
        self._canary_task = self._process.guard("canary", canary.run())

        def is_lost() -> bool:
            return self._healthy and self.gate.state is not GateState.DRAINING and not endpoint.is_registered

        watch_entry = RegistrationWatch(
            "worker",
            is_lost,
            self._runtime.restore,
            self._process.retire,
            interval_s=settings.canary_interval_s,
            checks=REGISTRATION_CHECKS,
        )
        self._process.guard("registration", watch_entry.run())

    async def _probe(self) -> None:
        """Send the smallest request through the language workers."""
        assert self._prober is not None, "started"
        request = TextRequest(model=self._settings.first_name, prompt=".", max_tokens=1, ignore_eos=True)
        await read_to_end(self._prober.generate(request, ProbeContext()))

    async def _set_healthy(self, healthy: bool) -> None:
        """Leave discovery while no language worker answers."""
        assert self._endpoint is not None, "started"
        self.observed.healthy.set(healthy)
        if healthy:
            await self._endpoint.register()
        self._healthy = healthy
        if not healthy:
            await self._endpoint.deregister()

    async def leave_discovery(self) -> None:
        """See `ServiceSteps.leave_discovery`."""
        if self._canary_task is not None:
            self._canary_task.cancel()  # it must not register the worker again
        self.observed.healthy.set(False)
        if self._endpoint is not None:
            await bounded("could not leave discovery", self._endpoint.deregister(), DISCOVERY_TIMEOUT_S)

    async def idle(self, timeout_s: float) -> bool:
        """See `ServiceSteps.idle`."""
        return await self.gate.idle(timeout_s)

    async def close(self) -> None:
        """See `ServiceSteps.close`."""
        self._model.close()
        self._scrape.close()
        await self._reports.aclose()


def _handler(
    settings: Settings, model: ModelClient, tokenizer: HubTokenizer, tracker: RequestTracker
) -> ProcessHandler:
    return ProcessHandler(model, tracker, tokenizer, HubTokenTexts(Path(settings.model)))


def _card(settings: Settings, language: ModelCard) -> ModelCard:
    """Return the card that makes frontends send this worker the text of requests; `language` is that of its workers."""
    return ModelCard(
        name=settings.first_name,
        other_names=settings.served_names[1:],
        directory=settings.model,
        model_input="text",
        context_length=language.context_length,
        block_size=language.block_size,
        total_blocks=0,
        max_running=0,
        router="round-robin",  # the frontend has no tokens to select by
    )
