"""The public endpoint in front of the frontend: keys, ids, the reasons of failures, and routes that are not public."""

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator

import openai
import pytest

from tests.e2e.harness import Serve, error_in, events, eventually, generated_token

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer one"}


def asking(text: str, **more: object) -> dict[str, object]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, "--api-key", "one,two", "--echo-faults", "--cors-origins", "https://a.example")
    yield serve
    serve.stop()


def client(serve: Serve, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serve.url}/v1", api_key=key, max_retries=0, timeout=60)


def test_a_client_needs_one_of_the_keys(serve: Serve) -> None:
    for key in ("one", "two"):
        answer = client(serve, key).chat.completions.create(**asking("Hello"))
        assert answer.choices[0].message.content == "HelloHel"
    with pytest.raises(openai.AuthenticationError, match="the API key is not valid") as refused:
        client(serve, "three").chat.completions.create(**asking("Hello"))
    assert refused.value.type == "invalid_request_error"
    assert serve.get("/health")[0] == serve.get("/live")[0] == 200
    assert serve.get("/v1/models")[0] == serve.get("/metrics")[0] == 401


def test_admin_routes_need_the_control_token_and_others_are_not_public(serve: Serve) -> None:
    assert serve.post("/busy_threshold", {"model": "echo"}, KEY)[0] == 401
    token = {"Authorization": f"Bearer {generated_token(serve.port)}"}
    status, text = serve.post("/busy_threshold", {"model": "echo"}, token)
    assert status == 200, text
    for path in ("/v1/realtime", "/v1/files", "/docs/", "/v1/classify"):
        status, text = serve.get(path)
        assert (status, error_in(text)["type"]) == (404, "invalid_request_error")


def test_the_id_of_a_request_is_in_the_answer_and_in_the_log_of_the_worker(serve: Serve) -> None:
    request = urllib.request.Request(
        serve.url + CHAT,
        data=json.dumps(asking("Hello")).encode(),
        headers={**KEY, "Content-Type": "application/json", "X-Request-Id": "made-by-the-client"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["x-request-id"] == "made-by-the-client"
    answer = client(serve, "one").chat.completions.with_raw_response.create(**asking("Hello"))
    generated = answer.headers["x-request-id"]
    for identity in ("made-by-the-client", generated):
        eventually(lambda identity=identity: identity in serve.log_of("worker-0"), what="the id is logged")


def test_the_reason_of_a_failure_reaches_the_client_whole_and_in_a_stream(serve: Serve) -> None:
    with pytest.raises(openai.InternalServerError, match=r"failed by \[\[fail\]\]") as failed:
        client(serve, "one").chat.completions.create(**asking("[[fail:0]]"))
    assert failed.value.code == "engine_failed"
    status, text = serve.post(CHAT, asking("[[fail:4]] or not", max_tokens=400, stream=True), KEY)
    assert status in (200, 500)  # 500 if it failed before the first token was sent
    error = [data for _, data in events(text) if "error" in data][-1] if status == 200 else text
    assert error_in(error)["code"] == "engine_failed"
    assert "[[fail]]" in error_in(error)["message"]
    assert '"level":"DEBUG"' not in serve.log_of("frontend")  # --runtime-log does not ask for it


def test_anthropics_messages_are_served_in_its_own_shape(serve: Serve) -> None:
    key = {"x-api-key": "two", "anthropic-version": "2023-06-01"}
    status, text = serve.post("/v1/messages", asking("Hello"), key)
    assert (status, json.loads(text)["content"][0]["text"]) == (200, "HelloHel")
    status, text = serve.post("/v1/messages", {**asking("Hello"), "model": "other"}, key)
    assert status == 404
    answer = json.loads(text)
    assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
    assert "this deployment serves 'echo'" in answer["error"]["message"]


def test_web_pages_of_allowed_origins_may_call(serve: Serve) -> None:
    request = urllib.request.Request(
        serve.url + CHAT,
        method="OPTIONS",
        headers={"Origin": "https://a.example", "Access-Control-Request-Method": "POST"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, "https://a.example")


def test_ambiguous_requests_do_not_reach_the_frontend(serve: Serve) -> None:
    with socket.create_connection(("127.0.0.1", serve.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /busy_threshold HTTP/1.1\r\nHost: a\r\n\r\n"
        )
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
