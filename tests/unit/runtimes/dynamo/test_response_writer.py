"""The way out of a stream: a reader that does not read holds up nothing but its own stream."""

import asyncio
import threading

import pytest

from baton.errors import Cancelled, ReaderStalled
from baton.ports.runtime import Wire
from baton.runtimes.dynamo.response_writer import AHEAD, INLINE_BYTES, INLINE_MESSAGES, Egress
from baton.testing import eventually, measure_lag, run_bounded


class SlowSender:
    """A Sender whose queue is full from message `room` on, until `read` is set; and whose reader may leave."""

    def __init__(self, room: int = 10**9) -> None:
        self.room = room
        self.sent: list[Wire] = []
        self.threads: set[str] = set()
        self.read = threading.Event()
        self.error: Exception | None = None
        self.closed = False

    def send(self, message: Wire) -> None:
        self.threads.add(threading.current_thread().name)
        if len(self.sent) >= self.room:
            self.read.wait(20)
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


INLINE = INLINE_MESSAGES + 1
"""So many messages of `send_many` leave before its thread does the rest."""


async def send_many(egress: Egress, count: int) -> None:
    """Send small messages, with one among them that is more than fits without a thread."""
    for number in range(count):
        await egress.send({"number": number, "filling": "x" * INLINE_BYTES * (number == INLINE_MESSAGES)})


async def send_and_end(egress: Egress) -> None:
    await egress.send({})
    await egress.close()


def egress_threads() -> int:
    return sum(thread.name == "baton-egress" for thread in threading.enumerate())


def test_the_first_messages_are_pushed_without_a_thread() -> None:
    async def body() -> None:
        sender = SlowSender()
        egress = Egress(sender, 1.0)
        await send_many(egress, 100)
        await egress.close()
        egress.release()
        assert sender.closed
        assert sender.threads == {threading.current_thread().name}

    run_bounded(body())


def test_messages_keep_their_order_when_a_thread_takes_over() -> None:
    async def body() -> None:
        sender = SlowSender()
        egress = Egress(sender, 5.0)
        await send_many(egress, INLINE + 200)
        await egress.close()
        assert sender.closed
        egress.release()
        assert [message["number"] for message in sender.sent] == list(range(INLINE + 200))
        assert len(sender.threads) == 2

    run_bounded(body())


def test_the_event_loop_stays_free_while_a_send_blocks() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE + 10)
        egress = Egress(sender, 20.0)
        measuring = asyncio.create_task(measure_lag())
        sending = asyncio.create_task(send_many(egress, INLINE + 100))
        await asyncio.sleep(1.0)
        assert not sending.done()
        assert sender.sent[-1]["number"] == INLINE + 9
        sender.read.set()
        await sending
        measuring.cancel()
        assert await measuring < 0.5
        egress.release()

    run_bounded(body())


def test_a_reader_that_does_not_read_for_too_long_is_given_up() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE + 5)
        egress = Egress(sender, 0.05)
        with pytest.raises(ReaderStalled, match=r"0\.05 s"):
            await send_many(egress, INLINE + 100)
        assert len(sender.sent) == INLINE + 5
        egress.release()
        sender.read.set()

    run_bounded(body())


@pytest.mark.parametrize("already_sent", [0, INLINE + 1], ids=["in the loop", "in the thread"])
def test_a_reader_that_left_is_a_cancelled_request(already_sent: int) -> None:
    async def body() -> None:
        sender = SlowSender()
        egress = Egress(sender, 5.0)
        await send_many(egress, already_sent)
        sender.error = RuntimeError("response stream is closed")
        with pytest.raises(Cancelled):
            await send_and_end(egress)
        assert not sender.closed
        egress.release()

    run_bounded(body())


@pytest.mark.parametrize("already_sent", [0, INLINE + 1], ids=["in the loop", "in the thread"])
def test_a_message_that_cannot_be_sent_is_an_error_of_its_own(already_sent: int) -> None:
    async def body() -> None:
        sender = SlowSender()
        egress = Egress(sender, 0.5)
        await send_many(egress, already_sent)
        sender.error = ValueError("cannot encode")
        with pytest.raises(ValueError, match="cannot encode"):
            await send_and_end(egress)
        assert not sender.closed
        egress.release()

    run_bounded(body())


def test_cancelling_a_blocked_send_lets_the_task_go() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE + 1)
        egress = Egress(sender, 20.0)
        sending = asyncio.create_task(send_many(egress, INLINE + 100))
        await eventually(lambda: len(sender.sent) > INLINE)
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        egress.release()
        sender.read.set()

    run_bounded(body())


@pytest.mark.parametrize("blocked", [False, True])
def test_the_thread_ends_with_its_stream(blocked: bool) -> None:
    async def body() -> None:
        await eventually(lambda: egress_threads() == 0)
        sender = SlowSender(room=INLINE + 1 if blocked else 10**9)
        egress = Egress(sender, 0.02)
        try:
            await send_many(egress, INLINE + 2)
            await egress.close()
        except ReaderStalled:
            assert blocked
        assert egress_threads() == 1
        egress.release()
        sender.read.set()
        await eventually(lambda: egress_threads() == 0)

    run_bounded(body())


def test_a_thread_that_outlives_its_loop_ends_quietly() -> None:
    sender = SlowSender(room=INLINE + 1)

    async def body() -> None:
        with pytest.raises(ReaderStalled):
            await send_many(Egress(sender, 0.02), INLINE + 2 + AHEAD)

    run_bounded(body())
    sender.read.set()
    run_bounded(eventually(lambda: egress_threads() == 0))


def test_a_reader_who_keeps_up_is_never_waited_for() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE)
        egress = Egress(sender, 5.0)
        sending = asyncio.create_task(send_many(egress, INLINE + AHEAD))
        await asyncio.wait_for(sending, 5.0)  # nothing of it has been read, and it is the thread's all the same
        more = asyncio.create_task(egress.send({"number": -1}))
        await asyncio.sleep(0.05)
        assert not more.done()
        sender.read.set()
        await more
        await egress.close()
        egress.release()
        assert len(sender.sent) == INLINE + AHEAD + 1

    run_bounded(body())


def test_what_was_ahead_is_not_sent_to_a_reader_that_is_given_up() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE)
        egress = Egress(sender, 5.0)
        await send_many(egress, INLINE + AHEAD)
        egress.release()
        sender.read.set()
        await eventually(lambda: egress_threads() == 0)
        assert len(sender.sent) <= INLINE + 1

    run_bounded(body())
