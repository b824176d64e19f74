"""The output stream: everything written is read once, merged, at any reading pace."""

import asyncio
import gc
import time
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine_kit.output_stream import OutputStream
from baton.errors import Cancelled, EngineFailed
from baton.protocol.outputs import (
    Finished,
    FinishReason,
    HandoffReady,
    Logprobs,
    Output,
    PromptCached,
    TokenDelta,
    TopLogprob,
)
from baton.testing import eventually, run_bounded


async def read_all(stream: OutputStream) -> list[Output]:
    outputs: list[Output] = []
    while batch := await stream.read():
        outputs += batch
    return outputs


def test_unread_tokens_merge_into_one_delta() -> None:
    async def body() -> None:
        stream = OutputStream()
        for token in range(5):
            stream.push([token])
        assert await stream.read() == [TokenDelta([0, 1, 2, 3, 4])]

    run_bounded(body())


def test_choices_merge_separately_in_the_order_of_their_first_token() -> None:
    async def body() -> None:
        stream = OutputStream(2)
        stream.push([1], 1)
        stream.push([2], 0)
        stream.push([3], 1)
        assert await stream.read() == [TokenDelta([1, 3], 1), TokenDelta([2], 0)]

    run_bounded(body())


def test_a_read_waits_for_the_first_token() -> None:
    async def body() -> None:
        stream = OutputStream()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0.01)
        assert not reading.done()
        stream.push([7])
        assert await reading == [TokenDelta([7])]

    run_bounded(body())


def test_the_stream_ends_with_its_last_choice() -> None:
    async def body() -> None:
        stream = OutputStream(2)
        stream.finish(FinishReason.EOS, 1)
        assert not stream.ended
        assert await stream.read() == [Finished(FinishReason.EOS, 1)]
        stream.finish(FinishReason.LENGTH, 0, stop_reason=3, cached_tokens=16)
        assert stream.ended
        assert await stream.read() == [Finished(FinishReason.LENGTH, 0, 3, 16)]
        assert await stream.read() == []

    run_bounded(body())


def test_nothing_is_written_after_the_end() -> None:
    async def body() -> None:
        stream = OutputStream()
        stream.push([1])
        stream.finish(FinishReason.EOS)
        stream.push([2])
        stream.finish(FinishReason.LENGTH)
        stream.hand_off({"room": 1})
        stream.fail(EngineFailed("late"))
        assert await read_all(stream) == [TokenDelta([1]), Finished(FinishReason.EOS)]

    run_bounded(body())


def test_an_error_is_raised_after_earlier_outputs_and_on_every_later_read() -> None:
    async def body() -> None:
        stream = OutputStream()
        stream.push([1])
        stream.fail(Cancelled("gone"))
        stream.fail(EngineFailed("late"))
        stream.push([2])
        assert await stream.read() == [TokenDelta([1])]
        for _ in range(2):
            with pytest.raises(Cancelled):
                await stream.read()

    run_bounded(body())


def test_an_error_wakes_a_waiting_read() -> None:
    async def body() -> None:
        stream = OutputStream()
        reading = asyncio.create_task(stream.read(asyncio.get_running_loop().time() + 3600))
        await asyncio.sleep(0)
        stream.push([1])
        await asyncio.sleep(0)
        stream.fail(Cancelled("gone"))
        assert await reading == [TokenDelta([1])]
        with pytest.raises(Cancelled):
            await stream.read()

    run_bounded(body())


def test_a_handoff_is_not_delayed_and_is_read_first() -> None:
    async def body() -> None:
        stream = OutputStream()
        reading = asyncio.create_task(stream.read(asyncio.get_running_loop().time() + 3600))
        await asyncio.sleep(0)
        stream.push([1])
        stream.hand_off({"room": 0})
        assert await reading == [HandoffReady({"room": 0}), TokenDelta([1])]

    run_bounded(body())


@pytest.mark.parametrize("written", ["before the read", "during the read"])
def test_not_before_delays_and_merges_tokens(written: str) -> None:
    async def body() -> None:
        stream = OutputStream()
        clock = asyncio.get_running_loop().time
        not_before = clock() + 0.5  # longer than a busy machine takes for what follows
        if written == "before the read":
            stream.push([1])
        reading = asyncio.create_task(stream.read(not_before))
        await asyncio.sleep(0.01)
        if written == "during the read":
            stream.push([1])
        await asyncio.sleep(0.01)
        stream.push([2])
        assert not reading.done()
        assert await reading == [TokenDelta([1, 2])]
        assert clock() >= not_before - 0.002

    run_bounded(body())


def test_tokens_wait_longer_after_the_loop_was_late() -> None:
    async def body() -> None:
        stream = OutputStream()
        loop = asyncio.get_running_loop()
        stream.push([1])
        first = asyncio.create_task(stream.read(loop.time() + 0.001))
        await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251 - the loop cannot fire the timer when it is due
        assert await first == [TokenDelta([1])]
        stream.push([2])
        second = asyncio.create_task(stream.read(loop.time()))
        await asyncio.sleep(0)
        stream.push([3])
        assert await second == [TokenDelta([2, 3])]
        stream.push([4])
        stream.finish(FinishReason.STOP)
        assert await stream.read() == [TokenDelta([4]), Finished(FinishReason.STOP)]

    run_bounded(body())


def test_not_before_of_one_read_does_not_delay_the_next() -> None:
    async def body() -> None:
        stream = OutputStream()
        stream.push([1])
        held = asyncio.create_task(stream.read(asyncio.get_running_loop().time() + 3600))
        await asyncio.sleep(0.01)
        held.cancel()
        await asyncio.wait([held])
        assert await stream.read() == [TokenDelta([1])]

    run_bounded(body())


def test_cancelling_a_read_in_the_iteration_in_which_it_wakes_loses_nothing() -> None:
    async def body() -> None:
        stream = OutputStream()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        stream.push([1])
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        stream.push([2])
        assert await stream.read() == [TokenDelta([1, 2])]

    run_bounded(body())


def test_logprobs_merge_with_their_tokens() -> None:
    async def body() -> None:
        stream = OutputStream()
        first = Logprobs((-0.1,), ((TopLogprob(1, 1, -0.1),),))
        second = Logprobs((-0.2, -0.3), ((TopLogprob(1, 2, -0.2),), (TopLogprob(1, 3, -0.3),)))
        stream.push([1], 0, first)
        stream.push([2, 3], 0, second)
        assert await stream.read() == [TokenDelta([1, 2, 3], 0, Logprobs((-0.1, -0.2, -0.3), first.top + second.top))]
        stream.push([4], 0, first)
        assert await stream.read() == [TokenDelta([4], 0, first)]

    run_bounded(body())


WRITES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), min_size=1, max_size=3)) | st.just("read"), max_size=30
)


@settings(max_examples=50)
@given(WRITES, st.permutations(range(3)))
def test_everything_written_is_read_once_in_order(writes: list[object], order: list[int]) -> None:
    async def body() -> list[Output]:
        stream = OutputStream(3)
        outputs: list[Output] = []
        pending = False
        for write in writes:
            match write:
                case (int(index), list(tokens)):
                    stream.push(list(tokens), index)
                    pending = True
                case _ if pending:
                    outputs += await stream.read()
                    pending = False
        for index in order:
            stream.finish(FinishReason.EOS, index)
        return outputs + await read_all(stream)

    outputs = run_bounded(body())
    for index in range(3):
        written = [token for write in writes if write != "read" and write[0] == index for token in write[1]]  # type: ignore[index]
        deltas = [output for output in outputs if isinstance(output, TokenDelta) and output.index == index]
        assert [token for delta in deltas for token in delta.token_ids] == written
        assert sum(isinstance(output, Finished) and output.index == index for output in outputs) == 1


class Receiver:
    """Takes tokens, as long as `takes`."""

    def __init__(self) -> None:
        self.taken: list[TokenDelta] = []
        self.takes = True

    def receive(self, delta: TokenDelta) -> bool:
        if self.takes:
            self.taken.append(delta)
        return self.takes


async def next_turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_receiver_gets_the_tokens_of_each_turn_while_the_read_waits() -> None:
    async def body() -> None:
        stream, receiver = OutputStream(2), Receiver()
        stream.pass_to(receiver.receive, 0.0)
        reading = asyncio.create_task(stream.read())
        await next_turns()
        logprobs = Logprobs((-0.5,))
        stream.push([1])
        stream.push([2])
        stream.push([3], 1, logprobs)
        await next_turns()
        stream.push([4])
        await next_turns()
        assert receiver.taken == [TokenDelta([1, 2]), TokenDelta([3], 1, logprobs), TokenDelta([4])]
        assert not reading.done()
        stream.push([5], 1)
        stream.finish(FinishReason.EOS, 1)
        assert await reading == [TokenDelta([5], 1), Finished(FinishReason.EOS, 1)]

    run_bounded(body())


def test_a_receiver_gets_nothing_while_nobody_reads() -> None:
    async def body() -> None:
        stream, receiver = OutputStream(), Receiver()
        stream.pass_to(receiver.receive, 0.0)
        stream.push([1])
        await next_turns()
        assert await stream.read() == [TokenDelta([1])]
        reading = asyncio.create_task(stream.read())
        await next_turns()
        stream.push([2])
        reading.cancel()
        await asyncio.wait([reading])
        await next_turns()
        assert receiver.taken == []
        assert await stream.read() == [TokenDelta([2])]

    run_bounded(body())


def test_an_event_loop_is_freed_after_streams_passed_tokens_on_it() -> None:
    async def body() -> "ref[asyncio.AbstractEventLoop]":
        stream, receiver = OutputStream(), Receiver()
        stream.pass_to(receiver.receive, 0.0)
        reading = asyncio.create_task(stream.read())
        await next_turns()
        stream.push([1])
        await eventually(lambda: receiver.taken == [TokenDelta([1])])
        stream.finish(FinishReason.EOS)
        await reading
        return ref(asyncio.get_running_loop())

    loop = run_bounded(body())
    gc.collect()
    assert loop() is None


def test_what_comes_with_the_first_tokens_is_read() -> None:
    async def body() -> None:
        stream, receiver = OutputStream(), Receiver()
        stream.pass_to(receiver.receive, 0.0)
        reading = asyncio.create_task(stream.read())
        await next_turns()
        stream.cached(16)
        stream.push([1])
        assert await reading == [PromptCached(16), TokenDelta([1])]
        assert receiver.taken == []

    run_bounded(body())


def test_tokens_that_come_within_the_interval_are_passed_together() -> None:
    async def body() -> None:
        stream, receiver = OutputStream(), Receiver()
        stream.pass_to(receiver.receive, 0.2)
        reading = asyncio.create_task(stream.read())
        await next_turns()
        clock = asyncio.get_running_loop().time
        stream.push([1])
        await eventually(lambda: len(receiver.taken) == 1)
        began = clock()
        for token in range(2, 5):
            stream.push([token])
            await next_turns()
        await eventually(lambda: len(receiver.taken) == 2)
        if clock() - began > 0.1:  # else this process was not run for so long that the interval was over
            assert receiver.taken == [TokenDelta([1]), TokenDelta([2, 3, 4])]
        reading.cancel()

    run_bounded(body())


def test_tokens_that_a_receiver_does_not_take_are_read() -> None:
    async def body() -> None:
        stream, receiver = OutputStream(2), Receiver()
        receiver.takes = False
        stream.pass_to(receiver.receive, 0.0)
        reading = asyncio.create_task(stream.read())
        await next_turns()
        logprobs = Logprobs((-0.5,))
        stream.push([1], 0, logprobs)
        stream.push([2], 1)
        outputs = await reading
        assert sorted(outputs, key=lambda delta: delta.index) == [TokenDelta([1], 0, logprobs), TokenDelta([2], 1)]  # type: ignore[union-attr]

    run_bounded(body())


def test_what_a_receiver_raises_ends_the_stream() -> None:
    async def body() -> None:
        def receive(delta: TokenDelta) -> bool:
            raise Cancelled("gone")

        stream, other, receiver = OutputStream(), OutputStream(), Receiver()
        stream.pass_to(receive, 0.0)
        other.pass_to(receiver.receive, 0.0)
        reading, undisturbed = asyncio.create_task(stream.read()), asyncio.create_task(other.read())
        await next_turns()
        stream.push([1])
        other.push([2])
        with pytest.raises(Cancelled):
            await reading
        assert stream.ended
        assert receiver.taken == [TokenDelta([2])]
        undisturbed.cancel()

    run_bounded(body())


EVENTS = st.lists(st.sampled_from(["turn", "refuse", "take"]) | st.tuples(st.integers(0, 1), st.integers(0, 99)))


@settings(max_examples=100)
@given(EVENTS)
def test_everything_is_passed_or_read_once_in_order(events: list[object]) -> None:
    async def body() -> list[TokenDelta]:
        stream, receiver = OutputStream(2), Receiver()
        stream.pass_to(receiver.receive, 0.0)

        async def read() -> None:
            while batch := await stream.read():
                receiver.taken += [output for output in batch if isinstance(output, TokenDelta)]

        reading = asyncio.create_task(read())
        for event in events:
            match event:
                case (int(index), int(token)):
                    stream.push([token], index)
                case "turn":
                    await asyncio.sleep(0)
                case _:
                    receiver.takes = event == "take"
        for index in range(2):
            stream.finish(FinishReason.EOS, index)
        await reading
        return receiver.taken

    deltas = run_bounded(body())
    for index in range(2):
        written = [event[1] for event in events if isinstance(event, tuple) and event[0] == index]
        assert [token for delta in deltas if delta.index == index for token in delta.token_ids] == written
