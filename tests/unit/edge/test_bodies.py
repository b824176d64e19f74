"""Bodies that are JSON in name only, or that no request has."""

import msgspec
import pytest

from baton.edge.errors import FieldError
from baton.edge.exchange import decode_object
from baton.edge.messages import Answer, Request
from baton.edge.routes import Frontend, Own
from baton.edge.served_models import ServedModels
from baton.edge.tokenize import TokenizeRoutes
from baton.ports.runtime import ModelCard
from baton.testing import run_bounded

NOT_JSON = (
    b"", b"{", b'{"a":NaN}', b'{"a":1e400}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"a":' + b"1" * 5000 + b"}",
    b'{"a":' * 100_000, b"\xef\xbb\xbf{}",
)  # fmt: skip


class NoModels:
    def cards(self) -> list[ModelCard]:
        return []

    async def fetch(self, path: str) -> tuple[int, bytes]:
        raise AssertionError("nothing is asked of the frontend")


ROUTES = TokenizeRoutes(ServedModels(NoModels()))


def refusal_of(route: Own, body: bytes) -> FieldError:
    async def answer(frontend: Frontend) -> Answer:
        request = Request()
        request.body = body
        return await route(request, frontend)

    with pytest.raises(FieldError) as refused:
        run_bounded(answer(NoModels()))
    return refused.value


@pytest.mark.parametrize("body", NOT_JSON)
def test_what_is_no_json_is_refused_as_that(body: bytes) -> None:
    with pytest.raises(FieldError, match="the body is not valid JSON"):
        decode_object(body)
    for route in (ROUTES.tokenize, ROUTES.detokenize, ROUTES.count_tokens):
        assert refusal_of(route, body).field_code == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"a"'])
def test_a_body_is_an_object(body: bytes) -> None:
    with pytest.raises(FieldError, match="must be a JSON object"):
        decode_object(body)


@pytest.mark.parametrize("blocks", [["a"], [1], [[]], [{"type": "text", "text": "a"}, None]])
def test_blocks_in_the_result_of_a_tool_are_objects(blocks: list[object]) -> None:
    message = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]}
    body = msgspec.json.encode({"model": "a", "messages": [message]})
    assert refusal_of(ROUTES.count_tokens, body).param == "messages"
