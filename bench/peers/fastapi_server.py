"""The FastAPI peer: one process on uvicorn (uvloop, httptools) that streams the same tokens itself.

It has no tokenizer and no worker process, so it shows the cost of HTTP and SSE alone in a Python server.
"""

import argparse
import time
import uuid
from collections.abc import AsyncIterator
from itertools import cycle, islice

import msgspec
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from bench.peers.pace import Wait, sleeping


class Message(BaseModel):
    role: str
    content: str


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]
    max_tokens: int = 128
    stream: bool = True
    stream_options: StreamOptions = StreamOptions()


class Delta(msgspec.Struct, omit_defaults=True):
    content: str = ""
    role: str = ""


class Choice(msgspec.Struct):
    delta: Delta
    index: int = 0
    finish_reason: str | None = None
    logprobs: None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion.chunk"


def sse(chunk: Chunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def stream_chat(request: ChatRequest, wait: Wait) -> AsyncIterator[bytes]:
    """One event per character of the repeated prompt, then the finish, the usage and `[DONE]`."""
    reply_id = f"chatcmpl-{uuid.uuid4()}"
    prompt = "".join(f"{message.role}: {message.content}\n" for message in request.messages)
    role = "assistant"
    for text in islice(cycle(prompt), request.max_tokens):
        await wait()
        yield sse(Chunk(reply_id, int(time.time()), request.model, [Choice(Delta(text, role))]))
        role = ""
    finish = Choice(Delta(), finish_reason="length")
    yield sse(Chunk(reply_id, int(time.time()), request.model, [finish]))
    if request.stream_options.include_usage:
        usage = Usage(len(prompt), request.max_tokens, len(prompt) + request.max_tokens)
        yield sse(Chunk(reply_id, int(time.time()), request.model, [], usage))
    yield b"data: [DONE]\n\n"


def create_app(pace_s: float) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> StreamingResponse:
        events = stream_chat(request, sleeping(pace_s))
        return StreamingResponse(events, media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    options = parser.parse_args()
    uvicorn.run(
        create_app(options.pace_ms / 1000),
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
