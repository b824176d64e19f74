"""Exchanges by themselves: what a cancellation leaves behind."""

import asyncio
import gc
import warnings

import pytest

from baton.edge.exchange import Exchange
from baton.edge.messages import Answer, Headers, Request
from baton.edge.routes import Composed, Frontend, Json, Route, Send
from tests.unit.edge.stage import on_uvloop, stage


class NoClient:
    """A writer to which nothing is written."""

    def write_head(self, request: Request, status: int, headers: Headers, length: int | None) -> None:
        raise AssertionError(status)

    def write_body(self, data: bytes) -> None:
        raise AssertionError(data)

    def flush(self) -> None:
        raise AssertionError

    def write_end(self) -> None:
        raise AssertionError

    def write_answer(self, request: Request, answer: Answer) -> None:
        raise AssertionError(answer)

    def break_off(self) -> None:
        raise AssertionError


def compose(path: str, body: Json) -> Composed:
    async def answer(send: Send) -> Answer:
        return Answer()

    return answer


async def own(request: Request, frontend: Frontend) -> Answer:
    return Answer()


@pytest.mark.parametrize(
    "route", [Route(path="/a", methods=(), compose=compose), Route(path="/a", methods=(), own=own)]
)
@on_uvloop
async def test_an_answer_that_is_cancelled_before_its_first_step_leaves_no_coroutine(route: Route) -> None:
    request = Request()
    request.body = b"{}"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        async with stage() as s:
            exchange = Exchange(s.edge, NoClient(), request, route)
            exchange.start()
            exchange.cancel()
            del exchange
            await asyncio.sleep(0.01)
        gc.collect()
    assert [str(each.message) for each in seen if each.category is RuntimeWarning] == []
