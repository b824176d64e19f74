"""From a request to the work an engine gets: what the engine cannot do is refused here, by name, for every engine."""

from collections.abc import Iterator, Mapping

from baton.errors import ContextTooLong, InvalidRequest, Unsupported
from baton.ports.engine import Capabilities, EngineInfo, Work
from baton.protocol.handoff import Handoff
from baton.protocol.ids import RequestId
from baton.protocol.media import Media
from baton.protocol.requests import GenerateRequest


def build_work(
    request: GenerateRequest,
    request_id: RequestId,
    info: EngineInfo,
    capabilities: Capabilities,
    trace_headers: Mapping[str, str],
    handoff: Handoff | None = None,
    media: tuple[Media, ...] = (),
) -> Work:
    """Return the work for `request`. Raises InvalidRequest, ContextTooLong or Unsupported, naming the field."""
    for problem in _unsupported(request, capabilities):
        raise Unsupported(problem)
    routing = request.routing
    return Work(
        request_id=request_id,
        token_ids=request.token_ids,
        media=media,
        max_tokens=_max_tokens(request, info.context_length),
        stop=request.stop,
        sampling=request.sampling,
        output=request.output,
        eos_token_ids=request.eos_token_ids or info.eos_token_ids,
        handoff=handoff,
        priority=(routing.priority or 0) if routing else 0,
        dp_rank=routing.dp_rank if routing else None,
        lora_name=routing.lora_name if routing else None,
        cache_salt=routing.cache_namespace if routing else None,
        trace_headers=trace_headers,
    )


def _max_tokens(request: GenerateRequest, context_length: int) -> int:
    """Return how many tokens the answer may have: what was asked for, or what is left of the context."""
    prompt = len(request.token_ids)
    if prompt == 0:
        raise InvalidRequest("token_ids: the prompt is empty")
    room = context_length - prompt
    asked = request.stop.max_tokens
    if room < 1:
        raise ContextTooLong(f"the prompt has {prompt} tokens; the context of this model is {context_length}")
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"max_tokens: {asked} tokens after a prompt of {prompt} exceed the context of {context_length}"
        )
    limit = room if asked is None else asked
    if (request.stop.min_tokens or 0) > limit:
        raise InvalidRequest(f"min_tokens: {request.stop.min_tokens} is more than the {limit} tokens allowed")
    return limit


def _unsupported(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    yield from _unsupported_choice(request, can)
    yield from _unsupported_output(request, can)
    for kind in request.sampling.guided_decoding.kinds() if request.sampling.guided_decoding else ():
        if kind not in can.guided:
            yield f"guided_decoding.{kind}: this engine cannot guide its output by {kind}"
    if request.routing is not None and request.routing.lora_name and not can.lora:
        yield "lora_name: this engine has no LoRA adapters"
    if request.routing is not None and (request.routing.dp_rank or 0) >= can.dp_size:
        yield f"dp_rank: this engine has {can.dp_size} ranks, and no rank {request.routing.dp_rank}"


def _unsupported_choice(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    sampling = request.sampling
    if request.choices > can.max_choices:
        yield f"n: this engine makes at most {can.max_choices} choices, not {request.choices}"
    if sampling.best_of not in (None, 1, request.choices):
        yield "best_of: this engine does not rank candidates"
    if sampling.use_beam_search:
        yield "use_beam_search: this engine has no beam search"
    if sampling.logit_bias and not can.logit_bias:
        yield "logit_bias: this engine does not take a bias"


def _unsupported_output(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    output = request.output
    if output.logprobs is not None and can.max_logprobs is None:
        yield "logprobs: this engine does not return log-probabilities"
    elif output.logprobs is not None and output.logprobs > (can.max_logprobs or 0):
        yield f"logprobs: this engine returns at most {can.max_logprobs} alternatives, not {output.logprobs}"
    if output.prompt_logprobs is not None and not can.prompt_logprobs:
        yield "prompt_logprobs: this engine does not return log-probabilities of the prompt"
