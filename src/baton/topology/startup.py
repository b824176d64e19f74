"""Whether the endpoint serves a model yet, asked the way a client would."""

import asyncio
import json


async def wait_for_model(host: str, port: int) -> str:
    """Return the name of the first model that `/v1/models` lists, once there is one. Bounded by the caller."""
    while True:
        names = await _models(host, port)
        if names:
            return names[0]
        await asyncio.sleep(0.05)


async def _models(host: str, port: int) -> list[str]:
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(target, port)
            try:
                writer.write(b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return []
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        return []
    return [str(entry["id"]) for entry in json.loads(body)["data"]]
