"""The double's engine: a thread that steps through its requests, with a queue, a batch, a cache and iteration stats."""

import random
import threading
import time
from collections import deque
from typing import Any

from tests.doubles.trtllm.cache import BlockCache, Hold
from tests.doubles.trtllm.model import START, after, after_all, choose, likely
from tests.doubles.trtllm.results import Response, ResultState
from tests.doubles.trtllm.world import World


class _Choice:
    def __init__(self, state: int, chance: random.Random) -> None:
        self.state = state
        self.chance = chance
        self.made = 0
        self.ended = False


class _Request:
    """One request inside the engine."""

    def __init__(self, result: ResultState, sampling: Any, params: Any, salt: str | None) -> None:
        self.result = result
        self.sampling = sampling
        self.params = params
        self.salt = salt
        self.prompt = result.prompt_token_ids
        self.kind = params.request_type if params is not None else "context_and_generation"
        self.hold: Hold | None = None
        self.wait = 0
        self.choices: list[_Choice] = []
        self.cancelled = False
        self.lent: bytes | None = None


class DoubleEngine:
    """Everything behind the double's LLM. `submit` and `cancel` are for any thread."""

    def __init__(
        self, world: World, facts_13: bool, vocabulary: int, cache: BlockCache, batch: int, keep_s: float, make: Any
    ):
        self._world = world
        self._new = facts_13
        self._vocabulary = vocabulary
        self.cache = cache
        self._batch = batch
        self._keep_s = keep_s
        self._make = make
        self._queue: deque[_Request] = deque()
        self._active: list[_Request] = []
        self._lent: list[_Request] = []
        self._changed = threading.Condition()
        self._iteration = 0
        self.stats: deque[dict[str, object]] = deque(maxlen=1000)
        self.over = False
        self.death: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="trtllm-double", daemon=True)
        self._thread.start()

    def submit(self, result: ResultState, sampling: Any, params: Any, salt: str | None) -> None:
        """Take a request in."""
        with self._changed:
            self._queue.append(_Request(result, sampling, params, salt))
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Mark a request; the next step ends it. One that has ended is not known any more."""
        with self._changed:
            for request in (*self._queue, *self._active):
                if request.result.request_id == number:
                    request.cancelled = True

    def wait_for(self, what: deque[Any], timeout_s: float) -> list[Any]:
        """Return what has come, after up to `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(what) or self.over, timeout_s)
            taken = list(what)
            what.clear()
            return taken

    def _die(self, error: Exception, heard_by: _Request) -> None:
        """Stop for good. Whoever reads first hears of it; the results of the others just never come."""
        self.over, self.death = True, error
        heard_by.result.feed([Response(error=error)])
        self._changed.notify_all()

    def shutdown(self) -> None:
        """End the thread."""
        with self._changed:
            self.over = True
            self._changed.notify_all()
        self._thread.join(5)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue or self._active or self.over), 0.05)
                self._release_taken()
                if self.over:
                    return
                if self._queue or self._active:
                    self._step()
            time.sleep(self._world.step_s)

    def _step(self) -> None:
        self._admit()
        running = list(self._active)
        ended = [request for request in running if self._advance(request)]
        # As in the engine, the stats of a step still count what ends with it, and after the last step none follows.
        self._tell_stats(len(running))
        for request in ended:
            self._active.remove(request)
            if request.lent is not None:
                self._lent.append(request)
            elif request.hold is not None:
                self.cache.give_back(request.hold)

    def _admit(self) -> None:
        for request in [each for each in self._queue if each.cancelled]:
            self._queue.remove(request)
            request.result.feed([Response(reason="cancelled", final=True)])
        while self._queue and len(self._active) < self._batch:
            request = self._queue[0]
            longest = len(request.prompt) + request.sampling.max_tokens * request.sampling.n
            request.hold = self.cache.take(request.prompt, longest, request.salt)
            if request.hold is None:
                return
            self._queue.popleft()
            request.wait = (
                self._world.transfer_steps if request.kind == "generation_only" else self._world.prefill_steps
            )
            self._active.append(request)

    def _advance(self, request: _Request) -> bool:
        """Make one step of a request; return whether it has ended."""
        if request.cancelled and self._cancel(request):
            return True
        if request.wait:
            request.wait -= 1
            return False
        if not request.choices:
            fault = self._world.fail_prompts.get(request.prompt[0])
            if fault is not None and self._suffer(request, fault):
                return True
            if not self._begin(request):
                return True
        responses: list[Response] = []
        for index, choice in enumerate(request.choices):
            if not choice.ended:
                responses.append(self._next(request, index, choice))
        if all(choice.ended for choice in request.choices):
            responses[-1].final = True
        if request.kind == "context_only":
            self._lend(request, responses[0])
        request.result.feed(responses)
        return responses[-1].final

    def _cancel(self, request: _Request) -> bool:
        self._world.cancelled += 1
        if request.kind == "generation_only" and request.wait:
            # What was set aside for KV on its way is lost for good: the engine cannot take it back.
            self._world.aborted_early += 1
            assert request.hold is not None
            self._world.blocks_leaked += request.hold.own + len(request.hold.names)
            request.hold = None
        request.result.feed([Response(reason="cancelled", final=True)])
        return True

    def _suffer(self, request: _Request, fault: str) -> bool:
        match fault:
            case "request":
                request.result.feed([Response(error=self._make.request_error("the engine failed it"))])
                return True
            case "timeout":
                request.result.feed([Response(reason="timeout", final=True)])
                return True
            case "garbage":
                request.choices = [_Choice(START, random.Random(0))]
                garbage: Any = ("no token",)
                request.result.feed([Response(tokens=garbage, logprobs=garbage)])
                return False
            case _:
                self._die(self._make.dead_error(), request)
                return True

    def _begin(self, request: _Request) -> bool:
        seed = request.sampling.seed
        if request.kind == "generation_only":
            lent = self._world.take(request.params.opaque_state)
            fits = lent is not None and lent.prompt_tokens == len(request.prompt)
            if lent is None or not fits or request.params.first_gen_tokens != [lent.first]:
                error = self._make.request_error("the KV of the context phase cannot be fetched")
                request.result.feed([Response(error=error)])
                return False
            state = lent.state
        else:
            state = after_all(START, request.prompt)
        request.choices = [
            _Choice(state, random.Random(time.time_ns() if seed is None else seed + index))
            for index in range(request.sampling.n)
        ]
        return True

    def _next(self, request: _Request, index: int, choice: _Choice) -> Response:
        sampling = request.sampling
        greedy = self._make.is_greedy(sampling)
        token = choose(choice.state, self._vocabulary, greedy, choice.chance)
        if request.kind == "generation_only" and choice.made == 0:
            token = request.params.first_gen_tokens[0]
        response = Response(index, (token,), self._logprobs(choice.state, token, sampling.logprobs))
        if choice.made == 0 and index == 0:
            response.prompt_logprobs = self._prompt_logprobs(request, token)
        response.cached = 0 if request.hold is None else request.hold.cached
        choice.state = after(choice.state, token)
        choice.made += 1
        if choice.made >= (sampling.min_tokens or 0):
            if token == sampling.end_id and not sampling.ignore_eos:
                response.reason, choice.ended = "stop", True
            elif token in (sampling.stop_token_ids or ()):
                response.reason, response.stop_reason, choice.ended = "stop", token, True
        if choice.made >= sampling.max_tokens and not choice.ended:
            response.reason, choice.ended = "length", True
        return response

    def _logprobs(self, state: int, token: int, asked: int | None) -> tuple[Any, ...]:
        if asked is None or (asked == 0 and not self._new):
            return ()
        options = likely(state, self._vocabulary)
        told = {each: self._make.logprob(logprob=value, rank=at) for at, (each, value) in enumerate(options[:asked], 1)}
        rank = [each for each, _ in options].index(token) + 1 if token in dict(options) else 6
        told.setdefault(token, self._make.logprob(logprob=dict(options).get(token, -4.0), rank=rank))
        return (told,)

    def _prompt_logprobs(self, request: _Request, first: int) -> list[Any] | None:
        asked = request.sampling.prompt_logprobs
        if asked is None or (asked == 0 and not self._new):
            return None
        state = START
        told: list[Any] = []
        for token, following in zip(request.prompt, [*request.prompt[1:], first], strict=True):
            state = after(state, token)
            told += self._logprobs(state, following, asked)
        return told

    def _lend(self, request: _Request, response: Response) -> None:
        token = response.tokens[0]
        state = after_all(START, request.prompt)
        if response.reason == "length":
            response.reason = "not_finished"
        request.lent = self._world.lend(state, len(request.prompt), token, self._keep_s)
        logprobs = [response.logprobs[0]] if response.logprobs else None
        response.params = self._make.handed_over(request, request.lent, token, logprobs)

    def _release_taken(self) -> None:
        for request in [each for each in self._lent if each.lent is not None and not self._world.is_lent(each.lent)]:
            self._lent.remove(request)
            if request.hold is not None:
                self.cache.give_back(request.hold)

    def _tell_stats(self, running: int) -> None:
        self._iteration += 1
        used = self.cache.used
        stat: dict[str, object] = {
            "iter": self._iteration,
            "numActiveRequests": running,
            "numQueuedRequests": len(self._queue),
            "maxNumActiveRequests": self._batch,
            "kvCacheStats": {
                "maxNumBlocks": self.cache.total,
                "freeNumBlocks": self.cache.total - used,
                "usedNumBlocks": used,
                "tokensPerBlock": self.cache.size,
            },
        }
        self.stats.append(stat)
        self._changed.notify_all()
