"""The client of `baton chat` says what is wrong with an endpoint."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.cli.chat_client import ChatClient, ChatFailed


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Return a function that starts an endpoint with one answer to every GET, and returns its URL."""
    servers: list[HTTPServer] = []

    def start(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("body", [b"<html>a login page</html>", b"{}", b'{"data": [1]}', b'{"data": null}', b""])
def test_an_address_that_is_no_openai_endpoint_is_named(answering: Callable[[bytes], str], body: bytes) -> None:
    url = answering(body)
    with pytest.raises(ChatFailed, match=f"{url}/v1/models does not list models"):
        ChatClient(url, None, 5, own=False).models()


def test_models_are_listed(answering: Callable[[bytes], str]) -> None:
    url = answering(b'{"data": [{"id": "a"}, {"id": "b"}]}')
    assert ChatClient(f"{url}/v1/", None, 5, own=False).models() == ["a", "b"]
