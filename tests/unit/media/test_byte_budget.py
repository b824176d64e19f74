"""Bytes of media: limits for a request and for all, waiting in order, and bytes that are free again."""

import asyncio
import threading

import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.media.byte_budget import ByteBudget
from baton.protocol.media import MediaFile
from baton.testing import eventually, run_bounded

SOON_S = 0.05
LONG_S = 30.0


def file_of(size: int) -> MediaFile:
    return MediaFile(modality="image", data=bytes(size))


def test_bytes_are_free_when_the_last_reference_to_a_file_is_dropped() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 100)
        share = await budget.open(20, SOON_S)
        share.take(70)
        assert budget.held == 70
        files = [file_of(60), file_of(5)]
        share.keep(files)
        share.close()
        assert budget.held == 65, "what no file has is free at once"
        del files[0]
        assert budget.held == 5
        thread = threading.Thread(target=files.clear)
        thread.start()
        thread.join()
        assert budget.held == 0

    run_bounded(body())


def test_a_request_that_is_given_up_holds_nothing() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 100)
        share = await budget.open(40, SOON_S)
        share.take(50)
        share.close()
        share.close()
        assert budget.held == 0

    run_bounded(body())


def test_the_limit_of_a_request_is_the_clients_fault() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 30)
        with pytest.raises(InvalidRequest, match="limit of 30 bytes for a request"):
            await budget.open(31, SOON_S)
        share = await budget.open(10, SOON_S)
        share.take(30)
        with pytest.raises(InvalidRequest, match="--media-max-request-bytes"):
            share.take(1)

    run_bounded(body())


def test_the_limit_of_all_requests_is_retryable_and_names_the_setting() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 100)
        first = await budget.open(0, SOON_S)
        first.take(90)
        second = await budget.open(5, SOON_S)
        second.take(10)
        with pytest.raises(Overloaded, match="--media-max-total-bytes") as refusal:
            second.take(1)
        assert (refusal.value.status, refusal.value.retryable) == (503, True)
        with pytest.raises(Overloaded, match="100 bytes"):
            await budget.open(0, SOON_S)
        assert budget.held == 100

    run_bounded(body())


def test_requests_wait_in_order_until_bytes_are_free() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 100)
        first = await budget.open(80, SOON_S)
        served: list[int] = []

        async def wait(size: int) -> None:
            await budget.open(size, LONG_S)
            served.append(size)

        large, small = asyncio.create_task(wait(50)), asyncio.create_task(wait(10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert served == [], "the small one does not overtake"
        first.close()
        await asyncio.gather(large, small)
        assert served == [50, 10]
        assert budget.held == 60

    run_bounded(body())


def test_a_request_that_waited_in_vain_lets_the_next_one_in() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 100)
        first = await budget.open(80, SOON_S)
        cancelled = asyncio.create_task(budget.open(50, LONG_S))
        second = asyncio.create_task(budget.open(10, LONG_S))
        await asyncio.sleep(0)
        cancelled.cancel()
        await second
        assert budget.held == 90
        first.close()
        assert budget.held == 10

    run_bounded(body())


def test_a_file_that_is_dropped_serves_those_who_wait() -> None:
    async def body() -> None:
        budget = ByteBudget(100, 100)
        share = await budget.open(100, SOON_S)
        files = [file_of(100)]
        share.take(100)
        share.keep(files)
        waiting = asyncio.create_task(budget.open(100, LONG_S))
        await asyncio.sleep(0)
        assert not waiting.done()
        threading.Thread(target=files.clear).start()
        await eventually(waiting.done)
        assert budget.held == 100

    run_bounded(body())


def test_bytes_are_given_back_while_something_refers_to_the_item() -> None:
    async def body() -> None:
        budget = ByteBudget(total=100, per_request=100)
        share = await budget.open(10, 1.0)
        item = MediaFile(modality="image", data=b"x" * 10)
        share.keep((item,))
        share.close()
        assert budget.held == 10
        budget.release(item)
        budget.release(item)
        assert budget.held == 0
        del item
        assert budget.held == 0

    run_bounded(body())
