"""Embedding requests inside SGLang."""

import itertools
from array import array
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from baton.engines.sglang.sglang_types import Manager
from baton.errors import BatonError, EngineFailed, InvalidRequest
from baton.ports.engine import EmbedWork


class EmbedRequests:
    """Sends texts and returns their vectors. Event-loop thread only."""

    def __init__(self, manager: Manager, make: Callable[..., Any]) -> None:
        self.running = 0
        self.steps = 0
        self._manager = manager
        self._make = make
        self._numbers = itertools.count(1)

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        """See `EmbedEngine.embed`."""
        first = next(self._numbers)
        request = self._make(
            input_ids=[list(tokens) for tokens in work.inputs],
            rid=[f"{first:012x}-{number:06x}-{work.request_id}" for number in range(len(work.inputs))],
            external_trace_header=dict(work.trace_headers) or None,
        )
        self.running += 1
        try:
            async with aclosing(self._manager.generate_request(request, None)) as answers:
                return [array("f", answer["embedding"]) for answer in await anext(answers)]
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        except BatonError:
            raise
        except Exception as error:
            raise EngineFailed(f"SGLang failed: {error!r}") from error
        finally:
            self.running -= 1
            self.steps += 1
