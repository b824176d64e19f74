"""Texts to vectors, through SGLang."""

import itertools
from array import array
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from baton.engines.sglang.sglang_types import Manager
from baton.errors import BatonError, ContextTooLong, EngineFailed, InvalidRequest
from baton.ports.engine import EmbedWork


class Embedder:
    """Embeds what it is given. Only ever touched from the event loop."""

    def __init__(self, manager: Manager, make: Callable[..., Any], vocabulary: int, longest: int) -> None:
        self.running = 0
        self.steps = 0
        self._manager = manager
        self._make = make
        self._vocabulary = vocabulary
        self._longest = longest
        self._numbers = itertools.count(1)

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        """See `EmbedEngine.embed`."""
        self._refuse_impossible(work)
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

    def _refuse_impossible(self, work: EmbedWork) -> None:
        for tokens in work.inputs:
            if not tokens:
                raise InvalidRequest("input: a text has no tokens")
            if len(tokens) > self._longest:
                raise ContextTooLong(f"input: a text has {len(tokens)} tokens; this engine takes {self._longest}")
            if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise InvalidRequest(f"input: the model has {self._vocabulary} tokens, and no token {max(tokens)}")
