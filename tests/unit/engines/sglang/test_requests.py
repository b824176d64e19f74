"""Requests inside SGLang, with a front half that does what a test says."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.compat import Dialect
from baton.engines.sglang.params import Setting
from baton.engines.sglang.requests import Requests
from baton.errors import Cancelled, EngineDead, EngineFailed, InvalidRequest, Paused
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing.bounded import eventually, run_bounded
from baton.testing.engine_session import read_to_the_end

ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


class FrontHalf:
    """Takes requests like SGLang's front half, and hands out the chunks that a test puts in."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.lora_ref_cache = {"fine": object()}
        self.chunks: dict[str, Any] = {}
        self.wakes = 0
        self.aborted: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def generate_request(self, request: Any, _: None) -> AsyncGenerator[dict[str, Any], None]:
        state = SimpleNamespace(dispatched=False, finished=False, event=asyncio.Event(), out_list=[])
        self.rid_to_state[request.rid] = state
        try:
            await self.open.wait()
            state.dispatched = True
            self.chunks[request.rid] = state
            while True:
                await state.event.wait()
                chunks, state.out_list = state.out_list, []
                state.event.clear()
                self.wakes += 1
                for chunk in chunks:
                    if isinstance(chunk, Exception):
                        raise chunk
                    yield chunk
                if state.finished:
                    return
        finally:
            self.rid_to_state.pop(request.rid, None)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Like SGLang's scheduler: it ends whatever begins so."""
        self.aborted.append(rid)
        for known in self.chunks:
            if known.startswith(rid):
                self.put(known, {"output_ids": [], "meta_info": {"finish_reason": ABORT}})

    def put(self, rid: str, chunk: dict[str, Any] | Exception) -> None:
        """Do what SGLang's receiving loop does with a chunk."""
        state = self.chunks[rid]
        state.finished = isinstance(chunk, Exception) or chunk["meta_info"]["finish_reason"] is not None
        state.out_list.append(chunk)
        state.event.set()

    def say(self, request_id: str, tokens: list[int], finish: dict[str, Any] | None = None) -> None:
        """Give the next chunk to a request."""
        (rid,) = [rid for rid in self.chunks if rid.endswith(f"-{request_id}")]
        self.put(rid, {"output_ids": tokens, "meta_info": {"finish_reason": finish}})


def make_work(name: str, **changes: Any) -> Work:
    return Work(**({"request_id": RequestId(name), "token_ids": (1, 2), "max_tokens": 9} | changes))


def make(default_priority: int | None = None) -> tuple[FrontHalf, Requests]:
    front = FrontHalf()
    setting = Setting(dialect=Dialect(version="0.5.23"), default_priority=default_priority)
    return front, Requests(front, lambda **fields: SimpleNamespace(**fields), setting)  # type: ignore[arg-type]


async def inside(front: FrontHalf, count: int) -> None:
    await eventually(lambda: len(front.chunks) == count)


def test_tokens_arrive_and_the_request_is_gone_at_its_end() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        assert (requests.waiting, requests.running) == (1, 0)
        await inside(front, 1)
        front.say("a", [4, 5])
        await stream.read()
        assert (requests.waiting, requests.running) == (0, 1)
        front.say("a", [6], {"type": "length", "length": 3})
        answer = await read_to_the_end(stream)
        assert answer.tokens[0] == [6]
        await eventually(lambda: requests.running == 0)
        assert requests.steps == 2

    run_bounded(body())


def test_chunks_between_the_first_and_the_last_are_delivered_at_once() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        await inside(front, 1)
        front.say("a", [4])
        await stream.read()
        for token in (5, 6, 7):
            front.say("a", [token])
        assert [delta.token_ids for delta in await stream.read()] == [[5, 6, 7]]  # type: ignore[union-attr]
        front.say("a", [8])
        front.say("a", [9], {"type": "length", "length": 6})
        assert (await read_to_the_end(stream)).tokens[0] == [8, 9]
        assert front.wakes == 2, "SGLang's generator has woken for the first chunk and for the last"
        assert requests.steps == 6

    run_bounded(body())


def test_a_chunk_that_cannot_be_read_fails_its_request_and_not_sglangs_loop() -> None:
    async def body() -> None:
        front, requests = make()
        asked = make_work("a", output=OutputOptions(logprobs=0))
        streams = [requests.submit(work) for work in (asked, make_work("b"))]
        await inside(front, 2)
        scores = {"finish_reason": None, "output_token_logprobs": [(-0.5, 4, None)]}
        front.put(next(iter(front.chunks)), {"output_ids": [4], "meta_info": scores})
        await streams[0].read()
        front.say("a", [5])  # without its log-probability
        front.say("b", [6], {"type": "length", "length": 1})
        with pytest.raises(EngineFailed, match="0 log-probabilities for 1"):
            await read_to_the_end(streams[0])
        assert (await read_to_the_end(streams[1])).tokens[0] == [6]
        await requests.close(EngineDead("over"))

    run_bounded(body())


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_d08_cancel_before_first_output(turns: int) -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await requests.abort(RequestId("a"))
        with pytest.raises(Cancelled):
            await stream.read()
        assert (requests.waiting, requests.running) == (0, 0)
        assert front.rid_to_state == {}

    run_bounded(body())


def test_d08_what_sglang_has_not_seen_is_not_left_to_run() -> None:
    async def body() -> None:
        front, requests = make()
        front.open.clear()  # as when it is paused
        stream = requests.submit(make_work("a"))
        await eventually(lambda: len(front.rid_to_state) == 1)
        await requests.abort(RequestId("a"))
        front.open.set()
        await asyncio.sleep(0.01)
        assert front.chunks == {}, "it never reached the scheduler"
        assert front.aborted == [], "where an abort would have been forgotten"
        with pytest.raises(Cancelled):
            await stream.read()

    run_bounded(body())


def test_d09_requests_of_one_trace_do_not_collide() -> None:
    async def body() -> None:
        front, requests = make()
        streams = {name: requests.submit(make_work(name)) for name in ("trace.1", "trace.10", "trace.11")}
        await inside(front, 3)
        await requests.abort(RequestId("trace.1"))
        with pytest.raises(Cancelled):
            await streams["trace.1"].read()
        for name in ("trace.10", "trace.11"):
            front.say(name, [7], {"type": "length", "length": 1})
            assert (await read_to_the_end(streams[name])).tokens[0] == [7]
        requests.submit(make_work("b"))
        with pytest.raises(InvalidRequest, match="in use"):
            requests.submit(make_work("b"))
        await requests.close(EngineDead("over"))

    run_bounded(body())


def test_an_abort_reaches_every_choice_and_waits_for_it() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a", sampling=Sampling(n=3)))
        await inside(front, 3)
        await requests.abort(RequestId("a"))
        assert len(set(front.aborted)) == 3
        assert front.rid_to_state == {}
        with pytest.raises(Cancelled):
            await stream.read()

    run_bounded(body())


def test_a_choice_that_fails_takes_the_others_along() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a", sampling=Sampling(n=2)))
        await inside(front, 2)
        front.put(next(iter(front.chunks)), ValueError("logit_bias: no"))
        with pytest.raises(InvalidRequest, match="logit_bias"):
            await stream.read()
        await eventually(lambda: requests.running + requests.waiting == 0)

    run_bounded(body())


def test_what_sglang_raises_is_the_requests_own_failure() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        await inside(front, 1)
        front.put(next(iter(front.chunks)), RuntimeError("boom"))
        with pytest.raises(EngineFailed, match="boom"):
            await stream.read()

    run_bounded(body())


def test_a_pause_that_ends_requests_is_not_a_cancellation() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        await inside(front, 1)
        requests.because = Paused("paused")
        front.say("a", [], ABORT)
        with pytest.raises(Paused):
            await stream.read()

    run_bounded(body())


def test_a_request_that_is_held_is_aborted_without_waiting_for_ever() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        await inside(front, 1)
        front.abort_request = lambda rid="", abort_all=False: None  # type: ignore[method-assign]
        requests.held = True
        await asyncio.wait_for(requests.abort(RequestId("a")), 5)
        with pytest.raises(Cancelled):
            await stream.read()
        await requests.close(EngineDead("over"))

    run_bounded(body())


def test_an_abort_that_a_pause_overtakes_does_not_wait_for_ever() -> None:
    async def body() -> None:
        front, requests = make()
        stream = requests.submit(make_work("a"))
        await inside(front, 1)
        front.abort_request = lambda rid="", abort_all=False: None  # type: ignore[method-assign]
        aborting = asyncio.create_task(requests.abort(RequestId("a")))
        await asyncio.sleep(0)
        requests.held = True
        await asyncio.wait_for(aborting, 5)
        with pytest.raises(Cancelled):
            await stream.read()
        await requests.close(EngineDead("over"))

    run_bounded(body())


def test_an_answer_that_stops_by_our_own_eyes_is_ended_inside() -> None:
    async def body() -> None:
        front, requests = make()
        stop = StopConditions(stop_token_ids=(5,), ignore_eos=True)
        stream = requests.submit(make_work("a", stop=stop))
        await inside(front, 1)
        front.say("a", [4, 5, 6])
        answer = await read_to_the_end(stream)
        assert answer.tokens[0] == [4, 5]
        assert isinstance(answer.ends[0], Finished)
        assert len(front.aborted) == 1
        await eventually(lambda: requests.running == 0)

    run_bounded(body())


def test_every_stream_fails_once_when_the_engine_dies() -> None:
    async def body() -> None:
        front, requests = make()
        streams: list[OutputStream] = [requests.submit(make_work(name)) for name in "abc"]
        await inside(front, 3)
        await requests.close(EngineDead("first"))
        await requests.close(EngineDead("second"))
        for stream in streams:
            with pytest.raises(EngineDead, match="first"):
                await stream.read()

    run_bounded(body())


@pytest.mark.parametrize(("default", "warnings"), [(None, 1), (0, 0)])
def test_a_priority_that_sglang_does_not_schedule_by_is_logged_once(
    default: int | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        _, requests = make(default)
        requests.submit(make_work("a"))
        assert not caplog.records
        for name in ("b", "c"):
            requests.submit(make_work(name, priority=3))
        await requests.close(EngineDead("over"))
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
        assert all("--enable-priority-scheduling" in record.getMessage() for record in caplog.records)

    run_bounded(body())


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    async def body() -> None:
        _, requests = make()
        with pytest.raises(InvalidRequest, match="lora_name"):
            requests.submit(make_work("a", lora_name="nobody"))
        requests.submit(make_work("a", lora_name="fine"))
        await requests.close(EngineDead("over"))

    run_bounded(body())
