"""Admission: requests are checked here, once, against the limits and capabilities of the engine, for every role.

What passes can be submitted: engines do not repeat these checks. Knows no engine.
"""

from collections.abc import Iterator, Mapping, Sequence

from baton.errors import ContextTooLong, InvalidRequest, Unsupported
from baton.handlers.unknown_options import unknown_options
from baton.models.reasoning import ends_reasoning
from baton.ports.engine import Capabilities, EngineInfo, Work
from baton.protocol.handoff import Handoff
from baton.protocol.ids import RequestId
from baton.protocol.requests import DiffusionOptions, GenerateRequest

MAX_TOKEN_DIGITS = 10
# Of one answer: each log-probability of a prompt is an object in one message.
MAX_PROMPT_LOGPROBS = 65_536
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 4096

_USED_BY = {"json": ", which response_format and a tool_choice other than auto and none require"}


def admit(
    request: GenerateRequest,
    request_id: RequestId,
    info: EngineInfo,
    can: Capabilities,
    trace_headers: Mapping[str, str],
    handoff: Handoff | None = None,
) -> Work:
    """Return the work for `request`, without its media. Raises InvalidRequest, ContextTooLong or Unsupported."""
    reasons_first = _reasons_before_its_guide(request, info)
    for problem in _unsupported(request, can, reasons_first):
        raise Unsupported(problem)
    _check_prompt(request.token_ids, info, "token_ids", _max_prompt(info, info.context_length - 1))
    max_tokens = _max_tokens(request, info.context_length)
    _check_sizes(request)
    _check_logit_bias(request.sampling.logit_bias or {}, info.vocab_size)
    routing = request.routing
    return Work(
        request_id=request_id,
        token_ids=request.token_ids,
        max_tokens=max_tokens,
        stop=request.stop,
        sampling=request.sampling,
        output=request.output,
        eos_token_ids=request.eos_token_ids or info.eos_token_ids,
        handoff=handoff,
        priority=(routing.priority or 0) if routing else 0,
        dp_rank=routing.dp_rank if routing else None,
        lora_name=routing.lora_name if routing else None,
        cache_salt=request.cache_salt,
        require_reasoning=reasons_first,
        diffusion=request.diffusion or DiffusionOptions(),
        trace_headers=trace_headers,
    )


def admit_encode(request: GenerateRequest, info: EngineInfo, can: Capabilities) -> None:
    """Check a request to encode the media of a prompt. Raises InvalidRequest or Unsupported.

    The length of the prompt is not checked: only the worker that computes it knows how much fits.
    """
    _check_prompt(request.token_ids, info, "token_ids")
    if not any((request.media or {}).values()):
        raise InvalidRequest("multi_modal_data: there is nothing to encode")
    for kind in request.media or ():
        if kind.removesuffix("_url") not in can.encoded_modalities:
            modalities = ", ".join(sorted(can.encoded_modalities))
            raise Unsupported(f"multi_modal_data.{kind}: this engine encodes {modalities} only")


def admit_embed(inputs: Sequence[Sequence[int]], info: EngineInfo, first: int = 0) -> None:
    """Check inputs to embed; `first` is the index of the first of them in the request. Raises InvalidRequest."""
    for index, tokens in enumerate(inputs, first):
        _check_prompt(tokens, info, f"input[{index}]", _max_prompt(info, info.context_length))


def _check_prompt(tokens: Sequence[int], info: EngineInfo, field: str, max_length: int | None = None) -> None:
    if not tokens:
        raise InvalidRequest(f"{field}: the prompt is empty")
    if max_length is not None and len(tokens) > max_length:
        raise ContextTooLong(
            f"{field}: this model's maximum context length is {info.context_length} tokens; the prompt has"
            f" {len(tokens)} and may have {max_length}"
        )
    for token in (min(tokens), max(tokens)):
        if not _in_vocabulary(token, info.vocab_size):
            raise InvalidRequest(f"{field}[{tokens.index(token)}]: {_no_such_token(token, info.vocab_size)}")


def _max_prompt(info: EngineInfo, fits: int) -> int:
    return fits if info.max_prompt_tokens is None else min(fits, info.max_prompt_tokens)


def _in_vocabulary(token: int, vocab_size: int | None) -> bool:
    return token >= 0 and (vocab_size is None or token < vocab_size)


def _no_such_token(token: int | str, vocab_size: int | None) -> str:
    size = "" if vocab_size is None else f"; it has {vocab_size}"
    return f"{token} is not a token of this model{size}"


def _check_sizes(request: GenerateRequest) -> None:
    """Refuse requests that cost more than their size suggests."""
    stop, asked = request.stop, request.output.prompt_logprobs
    entries = 0 if asked is None else len(request.token_ids) * (asked + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs: {asked} for each of {len(request.token_ids)} tokens are {entries} entries; at most"
            f" {MAX_PROMPT_LOGPROBS} are returned"
        )
    stop_lists = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    counts = {
        "stop_token_ids": (sum(len(tokens or ()) for tokens in stop_lists), MAX_STOP_TOKENS),
        "logit_bias": (len(request.sampling.logit_bias or {}), MAX_LOGIT_BIASES),
    }
    for field, (count, limit) in counts.items():
        if count > limit:
            raise InvalidRequest(f"{field}: {count} tokens; at most {limit} are accepted")


def _check_logit_bias(bias: Mapping[str, float], vocab_size: int | None) -> None:
    for key in bias:
        is_number = key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS
        if not is_number or not _in_vocabulary(int(key), vocab_size):
            raise InvalidRequest(f"logit_bias: {_no_such_token(repr(key[:32]), vocab_size)}")


def _max_tokens(request: GenerateRequest, context_length: int) -> int:
    """Return the limit of output tokens: the requested one, or the rest of the context."""
    prompt, requested = len(request.token_ids), request.stop.max_tokens
    rest = context_length - prompt
    if requested is not None and requested > rest:
        raise ContextTooLong(
            f"max_tokens: this model's maximum context length is {context_length} tokens; {requested} after a prompt of"
            f" {prompt} exceed it"
        )
    limit = rest if requested is None else requested
    if (request.stop.min_tokens or 0) > limit:
        raise InvalidRequest(f"min_tokens: {request.stop.min_tokens} is more than the {limit} tokens allowed")
    return limit


def _reasons_before_its_guide(request: GenerateRequest, info: EngineInfo) -> bool:
    """Whether the guide applies only after reasoning. A template that disables reasoning ends it in the prompt."""
    guided = request.sampling.guided_decoding
    if not request.require_reasoning or guided is None or not guided.kinds():
        return False
    return not ends_reasoning(request.token_ids, info.reasoning_end_token)


def _unsupported(request: GenerateRequest, can: Capabilities, reasons_first: bool) -> Iterator[str]:
    yield from unknown_options(request)
    yield from _unsupported_sampling(request, can)
    yield from _unsupported_guide(request, can, reasons_first)
    yield from _unsupported_diffusion(request.diffusion or DiffusionOptions(), can)
    yield from _unsupported_output(request, can)
    yield from _unsupported_routing(request, can)


def _unsupported_sampling(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    sampling = request.sampling
    if request.choices > can.max_choices:
        yield f"n: this engine generates at most {can.max_choices} choices, not {request.choices}"
    if sampling.best_of not in (None, 1, request.choices):
        yield "best_of: this engine does not rank candidates"
    if sampling.use_beam_search:
        yield "use_beam_search: this engine has no beam search"
    if sampling.length_penalty not in (None, 1.0):
        yield "length_penalty: it ranks the beams of a beam search, which this engine does not have"
    if sampling.logit_bias and not can.logit_bias:
        yield "logit_bias: this engine has no logit bias"
    if sampling.bad_words and not can.bad_words:
        yield "bad_words: this engine cannot exclude words"
    yield from _unsupported_stop(request, can)


def _unsupported_stop(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    if request.stop.stop_regex and not can.stop_regex:
        yield "stop_regex: this engine does not stop at regular expressions; use stop"
    if request.stop.max_thinking_tokens is not None and not can.max_thinking_tokens:
        yield "max_thinking_tokens: this engine has no thinking budget"


def _unsupported_guide(request: GenerateRequest, can: Capabilities, reasons_first: bool) -> Iterator[str]:
    guided = request.sampling.guided_decoding
    if guided is None:
        return
    kinds = guided.kinds()
    for kind in kinds:
        if kind not in can.guided:
            yield f"guided_decoding.{kind}: this engine cannot guide its output by {kind}{_USED_BY.get(kind, '')}"
    if not kinds and (guided.backend or guided.whitespace_pattern is not None):
        yield "guided_decoding: there is no constraint to apply the backend or the whitespace pattern to"
    if reasons_first and not can.guides_after_reasoning:
        yield (
            "require_reasoning: this engine guides its output from the first token, and the model would reason before;"
            ' disable reasoning (chat_template_kwargs: {"enable_thinking": false}) or the guide'
        )


def _unsupported_diffusion(options: DiffusionOptions, can: Capabilities) -> Iterator[str]:
    for name in options.given():
        if not can.diffusion:
            yield f"diffusion.{name}: this model generates from left to right; it is not a diffusion language model"
        elif name not in can.diffusion_options:
            yield f"diffusion.{name}: this engine takes it when it starts, and not with a request"


def _unsupported_output(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    output, limit = request.output, can.max_logprobs
    if output.logprobs is not None and limit is None:
        yield "logprobs: this engine does not return log-probabilities"
    if output.prompt_logprobs is not None and not can.prompt_logprobs:
        name = "echo with logprobs" if output.echo else "prompt_logprobs"
        yield f"{name}: this engine does not return log-probabilities of the prompt"
    for name, asked in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if (asked or 0) > (limit or 0):
            yield f"{name}: this engine returns at most {limit} alternatives, not {asked}"


def _unsupported_routing(request: GenerateRequest, can: Capabilities) -> Iterator[str]:
    routing = request.routing
    if routing is None:
        return
    if routing.lora_name and not can.lora:
        yield "lora_name: this engine has no LoRA adapters"
    if (routing.dp_rank or 0) >= can.dp_size:
        yield f"dp_rank: this engine has {can.dp_size} ranks, and no rank {routing.dp_rank}"
