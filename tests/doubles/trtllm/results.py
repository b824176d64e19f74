"""One request of the double: the same object at every step, with all tokens so far."""

import asyncio
from collections.abc import Callable
from typing import Any


class Response:
    """The output of one step for one request. It becomes visible when the result's reader reads it."""

    def __init__(
        self,
        choice: int = 0,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[Any, ...] = (),
        reason: str | None = None,
        stop_reason: int | None = None,
        final: bool = False,
        cached: int = 0,
        params: object = None,
        prompt_logprobs: list[Any] | None = None,
        error: Exception | None = None,
    ) -> None:
        self.choice = choice
        self.tokens = tokens
        self.logprobs = logprobs
        self.reason = reason
        self.stop_reason = stop_reason
        self.final = final
        self.cached = cached
        self.params = params
        self.prompt_logprobs = prompt_logprobs
        self.error = error


class ResultState:
    """Behind a `Bound`: built and read on the event loop, fed by the engine's thread."""

    def __init__(
        self, number: int, prompt: list[int], sampling: Any, output_class: type, abort: Callable[[int], None]
    ) -> None:
        self.request_id = self.id = number
        self.prompt_token_ids = prompt
        self.cached_tokens = 0
        self.metrics_dict: dict[object, object] = {}
        self._keep_stop = sampling.include_stop_str_in_output
        self._all = [output_class(index=index) for index in range(sampling.n)]
        self._abort = abort
        self._aborted = False
        self._done = False
        self._reading = False
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Response] = asyncio.Queue()

    @property
    def outputs(self) -> list[Any]:
        """Every choice."""
        return self._all

    @property
    def finished(self) -> bool:
        """Whether no step follows."""
        return self._done

    def abort(self) -> None:
        """Ask the engine to end the request; one more step follows."""
        self._abort(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def feed(self, responses: list[Response]) -> None:
        """From the engine's thread."""
        if not self._loop.is_closed():
            try:
                for response in responses:
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, response)
            except RuntimeError:
                return  # it has closed just now

    async def step(self) -> None:
        """Apply the next response, as `__anext__` does."""
        if self._done:
            raise StopAsyncIteration
        assert not self._reading, "a result has one reader"
        self._reading = True
        try:
            response = await self._queue.get()
        finally:
            self._reading = False
        if response.error is not None:
            self._done = True
            raise response.error
        self._apply(response)

    def _apply(self, response: Response) -> None:
        output = self._all[response.choice]
        output.token_ids.extend(response.tokens)
        output.logprobs.extend(response.logprobs)
        if response.prompt_logprobs is not None:
            output.prompt_logprobs = response.prompt_logprobs
        self.cached_tokens = response.cached
        output.disaggregated_params = response.params
        self._done = response.final
        if response.reason == "cancelled":
            for each in self._all:
                each.finish_reason = "cancelled"
        elif response.final:  # choices that ended before have no reason
            output.finish_reason = response.reason
            output.stop_reason = response.stop_reason
            if response.stop_reason is not None and not self._keep_stop:
                output.token_ids = output.token_ids[:-1]
            self.metrics_dict = {"ttft": 0.01, "e2e": 0.02}
