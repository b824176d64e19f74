"""The request that every client of the benchmark sends: a streamed chat completion with usage."""

import msgspec

HOST = "127.0.0.1"
PROMPT = "The quick brown fox jumps over the lazy dog."


def chat_body(tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": "echo",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def chat_request(tokens: int) -> bytes:
    body = chat_body(tokens)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
