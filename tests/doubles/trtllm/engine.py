"""The double's engine: a thread that steps through its requests, with a queue, a batch, a cache and iteration stats."""

import random
import secrets
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
        self.generated = 0
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
        self.kv_key: bytes | None = None


class DoubleEngine:
    """The engine behind the double's LLM. `submit` and `cancel` are for any thread."""

    def __init__(
        self,
        world: World,
        facts_13: bool,
        vocabulary: int,
        cache: BlockCache,
        batch: int,
        keep_s: float,
        make: Any,
        endpoint: str | None,
    ):
        self._world = world
        self._new = facts_13
        self._vocabulary = vocabulary
        self.cache = cache
        self._batch = batch
        self._keep_s = keep_s
        self._classes = make
        self._endpoint = endpoint  # of the Python transceiver, where decodes ask for KV by its id
        self._queue: deque[_Request] = deque()
        self._active: list[_Request] = []
        self._offered: list[_Request] = []
        self._changed = threading.Condition()
        self._iteration = 0
        self.stats: deque[dict[str, object]] = deque(maxlen=1000)
        self.over = False
        self.death: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="trtllm-double", daemon=True)
        self._thread.start()

    def submit(self, result: ResultState, sampling: Any, params: Any, salt: str | None) -> None:
        """Accept a request."""
        with self._changed:
            self._queue.append(_Request(result, sampling, params, salt))
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Mark a request; the next step ends it. One that has ended is unknown."""
        with self._changed:
            for request in (*self._queue, *self._active):
                if request.result.request_id == number:
                    request.cancelled = True

    def wait_for(self, items: deque[Any], timeout_s: float) -> list[Any]:
        """Remove and return `items`; waits up to `timeout_s` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(items) or self.over, timeout_s)
            fetched = list(items)
            items.clear()
            return fetched

    def _die(self, error: Exception, request: _Request) -> None:
        """Stop stepping. One request gets the error; the results of the others never arrive."""
        self.over, self.death = True, error
        request.result.feed([Response(error=error)])
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
                self._free_claimed()
                if self.over:
                    return
                if self._queue or self._active:
                    self._step()
            time.sleep(self._world.step_s)

    def _step(self) -> None:
        self._admit()
        running = list(self._active)
        ended = [request for request in running if self._advance(request)]
        # As in the engine, the statistics of a step count the requests that end with it, and none follow the last step.
        self._add_stats(len(running))
        for request in ended:
            self._active.remove(request)
            if request.kv_key is not None:
                self._offered.append(request)
            elif request.hold is not None:
                self.cache.free(request.hold)

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
        """Compute one step of a request; return whether it has ended."""
        if request.cancelled and self._cancel(request):
            return True
        if request.wait:
            request.wait -= 1
            return False
        if not request.choices:
            fault = self._world.fail_prompts.get(request.prompt[0])
            if fault is not None and self._inject_fault(request, fault):
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
            self._offer_kv(request, responses[0])
        request.result.feed(responses)
        return responses[-1].final

    def _cancel(self, request: _Request) -> bool:
        self._world.cancelled += 1
        if request.kind == "generation_only" and request.wait:
            # The blocks that were reserved for KV in transfer are lost: the engine cannot free them.
            self._world.aborted_early += 1
            assert request.hold is not None
            self._world.blocks_leaked += request.hold.own + len(request.hold.names)
            request.hold = None
        request.result.feed([Response(reason="cancelled", final=True)])
        return True

    def _inject_fault(self, request: _Request, fault: str) -> bool:
        match fault:
            case "request":
                request.result.feed([Response(error=self._classes.request_error("the engine failed it"))])
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
                self._die(self._classes.dead_error(), request)
                return True

    def _begin(self, request: _Request) -> bool:
        seed = request.sampling.seed
        if request.kind == "generation_only":
            kv = self._world.claim_kv(_key(request.params))
            fits = kv is not None and kv.prompt_tokens == len(request.prompt)
            if kv is None or not fits or request.params.first_gen_tokens != [kv.first]:
                error = self._classes.request_error("the KV of the context phase cannot be fetched")
                request.result.feed([Response(error=error)])
                return False
            state = kv.state
        else:
            state = after_all(START, request.prompt)
        request.choices = [
            _Choice(state, random.Random(time.time_ns() if seed is None else seed + index))
            for index in range(request.sampling.n)
        ]
        return True

    def _next(self, request: _Request, index: int, choice: _Choice) -> Response:
        sampling = request.sampling
        greedy = self._classes.is_greedy(sampling)
        token = choose(choice.state, self._vocabulary, greedy, choice.chance)
        if request.kind == "generation_only" and choice.generated == 0:
            token = request.params.first_gen_tokens[0]
        response = Response(index, (token,), self._logprobs(choice.state, token, sampling.logprobs))
        if choice.generated == 0 and index == 0:
            response.prompt_logprobs = self._prompt_logprobs(request, token)
        response.cached = 0 if request.hold is None else request.hold.cached
        choice.state = after(choice.state, token)
        choice.generated += 1
        if choice.generated >= (sampling.min_tokens or 0):
            if token == sampling.end_id and not sampling.ignore_eos:
                response.reason, choice.ended = "stop", True
            elif token in (sampling.stop_token_ids or ()):
                response.reason, response.stop_reason, choice.ended = "stop", token, True
        if choice.generated >= sampling.max_tokens and not choice.ended:
            response.reason, choice.ended = "length", True
        return response

    def _logprobs(self, state: int, token: int, requested: int | None) -> tuple[Any, ...]:
        if requested is None or (requested == 0 and not self._new):
            return ()
        options = likely(state, self._vocabulary)
        entries = {
            each: self._classes.logprob(logprob=value, rank=at)
            for at, (each, value) in enumerate(options[:requested], 1)
        }
        rank = [each for each, _ in options].index(token) + 1 if token in dict(options) else 6
        entries.setdefault(token, self._classes.logprob(logprob=dict(options).get(token, -4.0), rank=rank))
        return (entries,)

    def _prompt_logprobs(self, request: _Request, first: int) -> list[Any] | None:
        requested = request.sampling.prompt_logprobs
        if requested is None or (requested == 0 and not self._new):
            return None
        state = START
        logprobs: list[Any] = []
        for token, following in zip(request.prompt, [*request.prompt[1:], first], strict=True):
            state = after(state, token)
            logprobs += self._logprobs(state, following, requested)
        return logprobs

    def _offer_kv(self, request: _Request, response: Response) -> None:
        token = response.tokens[0]
        state = after_all(START, request.prompt)
        if response.reason == "length":
            response.reason = "not_finished"
        logprobs = [response.logprobs[0]] if response.logprobs else None
        state_key = None if self._endpoint is not None else secrets.token_bytes(24)
        params = self._classes.handoff_params(request, state_key, self._endpoint, token, logprobs)
        request.kv_key = _key(params)
        self._world.offer_kv(request.kv_key, state, len(request.prompt), token, self._keep_s)
        response.params = params

    def _free_claimed(self) -> None:
        for request in [
            each for each in self._offered if each.kv_key is not None and not self._world.is_offered(each.kv_key)
        ]:
            self._offered.remove(request)
            if request.hold is not None:
                self.cache.free(request.hold)

    def _add_stats(self, running: int) -> None:
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


def _key(params: Any) -> bytes:
    """Return how KV is found: by the C++ transceiver's state, or at the Python one's endpoint, rank and id."""
    if params.opaque_state is not None:
        return bytes(params.opaque_state)
    return f"{params.ctx_info_endpoint} {params.ctx_dp_rank} {params.disagg_request_id}".encode()
