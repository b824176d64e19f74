"""The rules of `ports/runtime.py` as tests, for every runtime.

What remains of an error between two processes: InvalidRequest stays InvalidRequest with its message, Cancelled stays
Cancelled, DeadlineExceeded stays DeadlineExceeded, and retryable stays retryable. Which retryable error it was may be
lost.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    EngineStalled,
    InvalidRequest,
    Overloaded,
    Paused,
    PeerLost,
    ReaderStalled,
    Unsupported,
)
from baton.ports.runtime import Context, ModelCard, SendNow, Service, Wire
from baton.protocol.codec import DecodeError
from baton.protocol.events import KvCleared, KvRemoved, KvStored, LoadSnapshot
from baton.testing.bounded import eventually, measure_lag
from baton.testing.runtime_stage import PATH, RuntimeStage, Ticker, make_push_service, make_service

INVALID = (InvalidRequest, ContextTooLong, Unsupported)
RETRYABLE = (Overloaded, Paused, Draining, PeerLost, EngineStalled, EngineDead)
FINAL = (Cancelled, DeadlineExceeded, ReaderStalled, EngineFailed)
HARMLESS = (*INVALID, *FINAL, Overloaded, Paused, PeerLost)

CARD = ModelCard(
    name="contract",
    directory=str(MODEL_DIR),
    context_length=1024,
    block_size=16,
    total_blocks=1000,
    max_running=8,
    kv_events=True,
    dp_size=2,
)


class RuntimeContract(RuntimeStage):
    """Subclass it in a test module, override `make_runtime`, and pytest checks the rules of `ports/runtime.py`."""

    # Calls

    def test_replies_arrive_in_order_and_then_the_call_ends(self) -> None:
        async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            for number in range(100):
                yield {"number": number, "asked": request["asked"]}

        async def body() -> None:
            async with self._served(handle) as served:
                replies = await served.call(asked="order")
                assert replies == [{"number": number, "asked": "order"} for number in range(100)]

        self._run(body())

    def test_a_call_without_replies_ends_without_an_error(self) -> None:
        async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            if request.get("reply"):
                yield {}

        async def body() -> None:
            async with self._served(handle) as served:
                assert await served.call() == []

        self._run(body())

    def test_requests_and_replies_pass_the_codec_of_the_service(self) -> None:
        async def handle(number: int, context: Context) -> AsyncGenerator[int, None]:
            yield number + 1

        async def body() -> None:
            service = Service(handle, lambda raw: int(raw["number"]), lambda number: {"next": number})  # type: ignore[index]
            async with self._started() as runtime:
                await runtime.serve(PATH, service)
                client = await runtime.client(PATH)
                await client.ready(5.0)
                assert [reply async for reply in client.call({"number": 4})] == [{"next": 5}]

        self._run(body())

    def test_values_of_every_kind_arrive_unchanged(self) -> None:
        async def body() -> None:
            async with self._served(_echo) as served:
                request = {"none": None, "text": "naïve ☃", "list": [1, 2.5, True, []], "map": {"a": {"b": -(2**62)}}}
                assert await served.call(**request) == [request]
                big = {"text": "x" * 1_000_000}
                assert await served.call(**big) == [big]

        self._run(body())

    def test_calls_run_concurrently(self) -> None:
        async def body() -> None:
            together = asyncio.Barrier(8)

            async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
                await together.wait()
                yield {"me": request["me"]}
                await together.wait()
                yield {"me": request["me"]}

            async with self._served(handle) as served:
                replies = await asyncio.gather(*(served.call(me=me) for me in range(8)))
                assert replies == [[{"me": me}] * 2 for me in range(8)]

        self._run(body())

    def test_endpoints_of_one_runtime_do_not_mix(self) -> None:
        async def other(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            yield {"other": True}

        async def body() -> None:
            async with self._served(_echo) as served:
                await served.runtime.serve("contract.other.endpoint", make_service(other))
                client = await served.runtime.client("contract.other.endpoint")
                await client.ready(5.0)
                assert [reply async for reply in client.call({})] == [{"other": True}]
                assert await served.call(mine=1) == [{"mine": 1}]

        self._run(body())

    def test_a_call_can_name_its_instance(self) -> None:
        async def body() -> None:
            async with self._served(_echo) as served:
                instance = served.endpoint.instance_id
                assert served.client.instances() == [instance]
                assert [reply async for reply in served.client.call({"a": 1}, instance=instance)] == [{"a": 1}]
                with pytest.raises(PeerLost):
                    await anext(served.client.call({}, instance=instance + 1))

        self._run(body())

    # Errors

    @pytest.mark.parametrize("replies", [0, 2])
    @pytest.mark.parametrize("error", INVALID)
    def test_an_invalid_request_stays_invalid_with_its_message(self, error: type[BatonError], replies: int) -> None:
        arrived = self._failure(error("temperature: too hot"), replies)
        assert isinstance(arrived, InvalidRequest)
        assert arrived.message == "temperature: too hot"

    @pytest.mark.parametrize("replies", [0, 2])
    @pytest.mark.parametrize("error", RETRYABLE)
    def test_a_retryable_error_stays_retryable(self, error: type[BatonError], replies: int) -> None:
        arrived = self._failure(error("not here"), replies)
        assert arrived.retryable
        assert "not here" in arrived.message

    @pytest.mark.parametrize("error", FINAL)
    def test_a_final_error_does_not_become_retryable_or_invalid(self, error: type[BatonError]) -> None:
        arrived = self._failure(error("over"), 1)
        assert not arrived.retryable
        assert not isinstance(arrived, InvalidRequest)

    @pytest.mark.parametrize("error", [Cancelled, DeadlineExceeded])
    def test_cancelled_and_deadline_exceeded_keep_their_type(self, error: type[BatonError]) -> None:
        arrived = self._failure(error("over"), 1)
        assert type(arrived) is error
        assert arrived.message == "over"

    def test_an_unexpected_error_arrives_as_a_baton_error_without_its_text(self) -> None:
        arrived = self._failure(KeyError("a secret"), 1)
        assert not arrived.retryable
        assert "a secret" not in arrived.message

    @pytest.mark.parametrize("error", HARMLESS)
    def test_a_request_that_fails_does_not_harm_the_next(self, error: type[BatonError]) -> None:
        async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            if request.get("fail"):
                raise error("this one only")
            yield {"fine": True}

        async def body() -> None:
            async with self._served(handle) as served:
                with pytest.raises(BatonError):
                    await served.call(fail=True)
                assert await served.call() == [{"fine": True}]

        self._run(body())

    def test_a_request_that_does_not_decode_is_an_invalid_request(self) -> None:
        def decode(raw: object) -> Wire:
            raise DecodeError("Expected `int` - at `$.max_tokens`")

        async def body() -> None:
            async with self._started() as runtime:
                await runtime.serve(PATH, Service(_echo, decode, lambda reply: reply))
                client = await runtime.client(PATH)
                await client.ready(5.0)
                with pytest.raises(InvalidRequest, match="max_tokens"):
                    await anext(client.call({"max_tokens": "many"}))

        self._run(body())

    # Cancellation

    def test_closing_the_call_early_closes_the_handler(self) -> None:
        async def body() -> None:
            ticker = Ticker()
            async with self._served(ticker.handle) as served:
                await _take(served.client.call({}), 3)
                await ticker.closed.wait()
                await ticker.cancelled.wait()

        self._run(body())

    def test_on_cancel_is_called_before_the_handler_is_closed(self) -> None:
        async def body() -> None:
            ticker = Ticker()
            async with self._served(ticker.handle) as served:
                await _take(served.client.call({}), 3)
                await ticker.closed.wait()
                assert ticker.cancelled_when_closed

        self._run(body())

    def test_cancelling_the_task_that_reads_closes_a_handler_that_waits(self) -> None:
        async def body() -> None:
            waits, closed, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
                context.on_cancel(cancelled.set)
                try:
                    waits.set()
                    await asyncio.sleep(3600)
                    yield {}
                finally:
                    closed.set()

            async with self._served(handle) as served:
                reading = asyncio.create_task(served.call())
                await waits.wait()
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                await cancelled.wait()
                await closed.wait()

        self._run(body())

    def test_a_call_that_is_cancelled_at_any_moment_ends_its_handler(self) -> None:
        async def body() -> None:
            inside: set[object] = set()

            async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
                disconnected = asyncio.Event()
                context.on_cancel(disconnected.set)
                inside.add(context)
                try:
                    await disconnected.wait()
                    yield {}
                finally:
                    inside.discard(context)

            async with self._served(handle) as served:
                for moment in range(40):
                    reading = asyncio.create_task(served.call())
                    await asyncio.sleep(moment * 0.0002)
                    reading.cancel()
                    await asyncio.wait([reading])
                await asyncio.sleep(0.05)
                await eventually(lambda: not inside)

        self._run(body())

    def test_on_cancel_is_called_once_in_the_event_loop_and_at_once_when_late(self) -> None:
        async def body() -> None:
            threads: list[int] = []
            late: list[int] = []
            disconnected = asyncio.Event()

            async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
                context.on_cancel(lambda: threads.append(threading.get_ident()))
                context.on_cancel(disconnected.set)
                try:
                    yield {}
                    await disconnected.wait()
                finally:
                    context.on_cancel(lambda: late.append(1))

            async with self._served(handle) as served:
                await _take(served.client.call({}), 1)
                await eventually(lambda: bool(late))
                assert threads == [threading.get_ident()]
                assert late == [1]

        self._run(body())

    def test_on_cancel_is_not_called_after_a_success(self) -> None:
        async def body() -> None:
            called: list[int] = []

            async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
                context.on_cancel(lambda: called.append(1))
                yield {}

            async with self._served(handle) as served:
                assert await served.call() == [{}]
                await asyncio.sleep(0.05)
                assert called == []

        self._run(body())

    def test_a_call_ends_with_cancelled_when_its_parent_is_cancelled(self) -> None:
        async def body() -> None:
            ticker = Ticker()
            async with self._served(ticker.handle) as served, self._parent(served.runtime) as (parent, disconnect):
                reading = asyncio.create_task(_read(served.client.call({}, parent=parent)))
                await asyncio.sleep(0.05)
                await disconnect()
                with pytest.raises(Cancelled):
                    await reading
                await ticker.cancelled.wait()
                await ticker.closed.wait()

        self._run(body())

    def test_a_call_carries_the_trace_of_its_parent(self) -> None:
        if not self.traces:
            pytest.skip("this runtime starts no traces")

        async def publish(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            yield dict(context.trace_headers)

        async def body() -> None:
            async with self._served(publish) as served, self._parent(served.runtime) as (parent, _):
                [headers] = [reply async for reply in served.client.call({}, parent=parent)]
                trace_id = parent.trace_headers["traceparent"].split("-")[1]
                assert str(headers["traceparent"]).split("-")[1] == trace_id

        self._run(body())

    # Stalled readers

    @pytest.mark.parametrize("pushes", [False, True], ids=["yielded", "sent past the iterator"])
    @pytest.mark.parametrize(("replies", "size"), [(20_000, 16), (4_000, 4_000)])
    def test_a_reader_that_stops_reading_blocks_no_other_call(self, replies: int, size: int, pushes: bool) -> None:
        filling = "x" * size
        refused = 0

        async def handle(request: Wire, context: Context, send_now: SendNow[Wire]) -> AsyncGenerator[Wire, None]:
            nonlocal refused
            for number in range(replies if request.get("many") else 1):
                reply: Wire = {"number": number, "filling": filling}
                if not pushes or number % 1000 == 0:
                    yield reply
                elif not send_now(reply):
                    refused += 1
                    yield reply
                if number % 64 == 0:
                    await asyncio.sleep(0)

        async def body() -> None:
            async with self._served(make_push_service(handle)) as served:
                measuring = asyncio.create_task(measure_lag())
                async with aclosing(served.client.call({"many": True})) as stalled:
                    numbers = [(await anext(stalled))["number"]]
                    for _ in range(10):
                        await asyncio.sleep(0.1)
                        assert len(await served.call()) == 1
                    numbers += [reply["number"] async for reply in stalled]
                measuring.cancel()
                assert numbers == list(range(replies))
                assert await measuring < self.lag_limit_s
                assert bool(refused) == (pushes and self.refuses_to_block)

        self._run(body())

    def test_a_handler_that_only_sends_past_its_iterator_is_answered(self) -> None:
        async def handle(request: Wire, context: Context, send_now: SendNow[Wire]) -> AsyncGenerator[Wire, None]:
            assert send_now({"number": 1})
            if "more" in request:
                yield {}

        async def body() -> None:
            async with self._served(make_push_service(handle)) as served:
                assert await served.call() == [{"number": 1}]

        self._run(body())

    # Discovery

    def test_deregister_and_register_are_seen_by_clients_and_idempotent(self) -> None:
        async def body() -> None:
            async with self._served(_echo) as served:
                instance = served.endpoint.instance_id
                for _ in range(2):
                    await served.endpoint.deregister()
                    await served.endpoint.deregister()
                    await eventually(lambda: served.client.instances() == [])
                    with pytest.raises(PeerLost):
                        await served.call()
                    await served.endpoint.register()
                    await served.endpoint.register()
                    assert await served.client.ready(5.0) == [instance]
                    await served.until_reachable()

        self._run(body())

    def test_an_endpoint_can_be_deregistered_as_soon_as_it_is_served(self) -> None:
        async def body() -> None:
            async with self._started() as runtime:
                endpoint = await runtime.serve(PATH, make_service(_echo))
                await endpoint.deregister()
                client = await runtime.client(PATH)
                await asyncio.sleep(0.1)
                assert client.instances() == []

        self._run(body())

    def test_an_endpoint_knows_whether_it_is_registered(self) -> None:
        async def body() -> None:
            async with self._served(Ticker().handle) as served:
                assert served.endpoint.is_registered
                await served.endpoint.deregister()
                await eventually(lambda: not served.endpoint.is_registered)
                await served.endpoint.register()
                await eventually(lambda: served.endpoint.is_registered)

        self._run(body())

    def test_restore_changes_nothing_for_endpoints_that_are_where_they_should_be(self) -> None:
        async def body() -> None:
            async with self._served(Ticker().handle) as served:
                await served.runtime.restore()
                assert served.endpoint.is_registered
                await served.endpoint.deregister()
                await eventually(lambda: not served.endpoint.is_registered)
                await served.runtime.restore()
                await asyncio.sleep(0.1)
                assert not served.endpoint.is_registered

        self._run(body())

    def test_a_running_call_continues_after_deregister(self) -> None:
        async def body() -> None:
            ticker = Ticker()
            async with self._served(ticker.handle) as served, aclosing(served.client.call({})) as replies:
                await anext(replies)
                await served.endpoint.deregister()
                await eventually(lambda: served.client.instances() == [])
                assert [(await anext(replies))["number"] for _ in range(20)] == list(range(1, 21))

        self._run(body())

    def test_ready_raises_peer_lost_without_instances(self) -> None:
        async def body() -> None:
            async with self._started() as runtime:
                client = await runtime.client("contract.absent.endpoint")
                assert client.instances() == []
                with pytest.raises(PeerLost):
                    await client.ready(0.1)
                with pytest.raises(PeerLost):
                    await anext(client.call({}))

        self._run(body())

    def test_ready_returns_when_an_instance_appears(self) -> None:
        async def body() -> None:
            async with self._started() as runtime:
                client = await runtime.client(PATH)
                waiting = asyncio.create_task(client.ready(10.0))
                await asyncio.sleep(0.05)
                endpoint = await runtime.serve(PATH, make_service(_echo))
                assert await waiting == [endpoint.instance_id]

        self._run(body())

    # Models

    def test_adapters_are_registered_and_deregistered_any_number_of_times(self) -> None:
        async def body() -> None:
            async with self._served(_echo) as served:
                await served.endpoint.register_model(CARD)
                for name in ("fine", "fine", "owner/other one"):
                    await served.endpoint.register_adapter(name)
                with pytest.raises(InvalidRequest, match="name of the model"):
                    await served.endpoint.register_adapter(CARD.name)
                for name in ("fine", "fine", "never registered"):
                    await served.endpoint.deregister_adapter(name)
                await served.call()

        self._run(body())

    # Readings and metrics

    def test_publishing_readings_does_not_block_the_event_loop(self) -> None:
        async def handle(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
            yield {}

        async def body() -> None:
            async with self._served(handle) as served:
                await served.endpoint.register_model(CARD)
                measuring = asyncio.create_task(measure_lag())
                for number in range(1000):
                    rank = number % CARD.dp_size
                    served.endpoint.publish(LoadSnapshot(number, 0, number, 1000, dp_rank=rank))
                    served.endpoint.publish(KvStored((number,), tuple(range(16)), 16, dp_rank=rank))
                    served.endpoint.publish(KvRemoved((number,), dp_rank=rank))
                for rank in range(CARD.dp_size):
                    served.endpoint.publish(KvCleared(dp_rank=rank))
                await served.call()
                measuring.cancel()
                assert await measuring < self.lag_limit_s

        self._run(body())

    def test_metrics_of_the_runtime_can_be_read_while_it_runs_and_are_empty_otherwise(self) -> None:
        async def body() -> None:
            runtime = self.make_runtime()
            assert await runtime.metrics() == ""
            async with self._served(_echo) as served:
                await served.call()
                names = [family.name for family in text_string_to_metric_families(await served.runtime.metrics())]
                assert len(names) == len(set(names))
                await served.runtime.shutdown()
                assert await served.runtime.metrics() == ""

        self._run(body())

    # Shutdown

    def test_shutdown_cancels_handlers_that_run_and_their_calls_fail(self) -> None:
        async def body() -> None:
            ticker = Ticker()
            async with self._served(ticker.handle) as served:
                reading = asyncio.create_task(served.call())
                await asyncio.sleep(0.05)
                await served.runtime.shutdown()
                await ticker.closed.wait()
                with pytest.raises(BatonError):
                    await reading

        self._run(body())

    def test_shutdown_is_idempotent_and_valid_before_start(self) -> None:
        async def body() -> None:
            await self.make_runtime().shutdown()
            async with self._served(_echo) as served:
                await served.runtime.shutdown()
                await served.runtime.shutdown()
                with pytest.raises(BatonError):
                    await served.runtime.serve("contract.late.endpoint", make_service(_echo))

        self._run(body())


async def _echo(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
    yield request


async def _take(call: AsyncGenerator[Wire, None], count: int) -> list[Wire]:
    async with aclosing(call):
        return [await anext(call) for _ in range(count)]


async def _read(call: AsyncGenerator[Wire, None]) -> list[Wire]:
    async with aclosing(call):
        return [reply async for reply in call]
