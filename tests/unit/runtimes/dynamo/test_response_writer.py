"""The response writer: a client that does not read blocks its own stream only."""

import asyncio
import threading
from contextlib import suppress

import pytest

from baton.errors import Cancelled, ReaderStalled
from baton.ports.runtime import Wire
from baton.runtimes.dynamo.response_writer import INLINE_BYTES, INLINE_MESSAGES, MAX_PENDING, ResponseWriter, Sender
from baton.testing import eventually, measure_lag, run_bounded


class SlowSender:
    """A Sender whose queue is full from message `room` on, until `read` is set; sends fail with `error` if set."""

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
"""How many messages of `send_many` are sent from the event loop; the thread sends the rest."""


def new_writer(sender: Sender, stall_timeout_s: float) -> ResponseWriter[Wire]:
    return ResponseWriter(sender, lambda reply: reply, stall_timeout_s)


async def send_many(writer: ResponseWriter[Wire], count: int) -> None:
    """Send small messages, with one among them that is more than fits without a thread."""
    for number in range(count):
        await writer.send({"number": number, "filling": "x" * INLINE_BYTES * (number == INLINE_MESSAGES)})


async def send_and_end(writer: ResponseWriter[Wire]) -> None:
    await writer.send({})
    await writer.close()


def writer_threads() -> int:
    return sum(thread.name == "baton-responses" for thread in threading.enumerate())


def test_the_first_messages_are_sent_without_a_thread() -> None:
    async def body() -> None:
        sender = SlowSender()
        writer = new_writer(sender, 1.0)
        await send_many(writer, 100)
        await writer.close()
        writer.release()
        assert sender.closed
        assert sender.threads == {threading.current_thread().name}

    run_bounded(body())


def test_messages_keep_their_order_across_the_switch_to_the_thread() -> None:
    async def body() -> None:
        sender = SlowSender()
        writer = new_writer(sender, 5.0)
        await send_many(writer, INLINE + 200)
        await writer.close()
        assert sender.closed
        writer.release()
        assert [message["number"] for message in sender.sent] == list(range(INLINE + 200))
        assert len(sender.threads) == 2

    run_bounded(body())


def test_the_event_loop_stays_free_while_a_send_blocks() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE + 10)
        writer = new_writer(sender, 20.0)
        measuring = asyncio.create_task(measure_lag())
        sending = asyncio.create_task(send_many(writer, INLINE + 100))
        await asyncio.sleep(1.0)
        assert not sending.done()
        assert sender.sent[-1]["number"] == INLINE + 9
        sender.read.set()
        await sending
        measuring.cancel()
        assert await measuring < 0.5
        writer.release()

    run_bounded(body())


def test_a_client_that_does_not_read_for_too_long_is_an_error() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE + 5)
        writer = new_writer(sender, 0.05)
        with pytest.raises(ReaderStalled, match=r"0\.05 s"):
            await send_many(writer, INLINE + 100)
        assert len(sender.sent) == INLINE + 5
        writer.release()
        sender.read.set()

    run_bounded(body())


@pytest.mark.parametrize("already_sent", [0, INLINE + 1], ids=["in the loop", "in the thread"])
def test_a_client_that_disconnects_cancels_the_request(already_sent: int) -> None:
    async def body() -> None:
        sender = SlowSender()
        writer = new_writer(sender, 5.0)
        await send_many(writer, already_sent)
        sender.error = RuntimeError("response stream is closed")
        with pytest.raises(Cancelled):
            await send_and_end(writer)
        assert not sender.closed
        writer.release()

    run_bounded(body())


@pytest.mark.parametrize("already_sent", [0, INLINE + 1], ids=["in the loop", "in the thread"])
def test_a_message_that_cannot_be_sent_raises_its_own_error(already_sent: int) -> None:
    async def body() -> None:
        sender = SlowSender()
        writer = new_writer(sender, 0.5)
        await send_many(writer, already_sent)
        sender.error = ValueError("cannot encode")
        with pytest.raises(ValueError, match="cannot encode"):
            await send_and_end(writer)
        assert not sender.closed
        writer.release()

    run_bounded(body())


def test_a_blocked_send_can_be_cancelled() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE + 1)
        writer = new_writer(sender, 20.0)
        sending = asyncio.create_task(send_many(writer, INLINE + 100))
        await eventually(lambda: len(sender.sent) > INLINE)
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        writer.release()
        sender.read.set()

    run_bounded(body())


@pytest.mark.parametrize("blocked", [False, True])
def test_the_thread_ends_with_its_stream(blocked: bool) -> None:
    async def body() -> None:
        await eventually(lambda: writer_threads() == 0)
        sender = SlowSender(room=INLINE + 1 if blocked else 10**9)
        writer = new_writer(sender, 0.02)
        try:
            await send_many(writer, INLINE + 2)
            await writer.close()
        except ReaderStalled:
            assert blocked
        assert writer_threads() == 1
        writer.release()
        sender.read.set()
        await eventually(lambda: writer_threads() == 0)

    run_bounded(body())


def test_a_thread_that_outlives_its_loop_ends_quietly() -> None:
    sender = SlowSender(room=INLINE + 1)

    async def body() -> None:
        with pytest.raises(ReaderStalled):
            await send_many(new_writer(sender, 0.02), INLINE + 2 + MAX_PENDING)

    run_bounded(body())
    sender.read.set()
    run_bounded(eventually(lambda: writer_threads() == 0))


def test_sends_do_not_wait_until_the_maximum_is_pending() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE)
        writer = new_writer(sender, 5.0)
        sending = asyncio.create_task(send_many(writer, INLINE + MAX_PENDING))
        await asyncio.wait_for(sending, 5.0)  # nothing of it has been read
        more = asyncio.create_task(writer.send({"number": -1}))
        await asyncio.sleep(0.05)
        assert not more.done()
        sender.read.set()
        await more
        await writer.close()
        writer.release()
        assert len(sender.sent) == INLINE + MAX_PENDING + 1

    run_bounded(body())


def test_pending_messages_are_dropped_on_release() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE)
        writer = new_writer(sender, 5.0)
        await send_many(writer, INLINE + MAX_PENDING)
        writer.release()
        sender.read.set()
        await eventually(lambda: writer_threads() == 0)
        assert len(sender.sent) <= INLINE + 1

    run_bounded(body())


def test_what_could_block_is_not_sent_at_once_and_keeps_its_place() -> None:
    async def body() -> None:
        sender = SlowSender(room=INLINE)
        writer = new_writer(sender, 5.0)
        await send_many(writer, INLINE + MAX_PENDING)
        assert not writer.send_now({"number": INLINE + MAX_PENDING})
        waiting = asyncio.create_task(writer.send({"number": INLINE + MAX_PENDING}))
        sender.read.set()
        await waiting
        await eventually(lambda: writer.send_now({"number": INLINE + MAX_PENDING + 1}))
        await writer.close()
        writer.release()
        assert [message["number"] for message in sender.sent] == list(range(INLINE + MAX_PENDING + 2))

    run_bounded(body())


@pytest.mark.parametrize("already_sent", [0, INLINE + 1], ids=["in the loop", "in the thread"])
def test_sending_at_once_raises_when_the_client_has_disconnected(already_sent: int) -> None:
    async def body() -> None:
        sender = SlowSender()
        writer = new_writer(sender, 5.0)
        await send_many(writer, already_sent)
        sender.error = RuntimeError("response stream is closed")

        def refused() -> bool:
            with suppress(Cancelled):
                writer.send_now({})
                return False
            return True

        await eventually(refused)  # the thread finds it out with the message before
        writer.release()

    run_bounded(body())
