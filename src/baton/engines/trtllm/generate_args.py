"""From work to one call of the library: everything by keyword, and nothing that was not asked for."""

import logging
import secrets

from baton.engines.trtllm import handoff
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import BothFields, DisaggregatedFields13, GenerateFields13, PromptFields
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.media_handles import Handles, fields_of, handles_of
from baton.engines.trtllm.params import Model, engine_choices, engine_priority, sampling_params
from baton.errors import ContextTooLong, InvalidRequest, Unsupported
from baton.ports.engine import EngineInfo, Work
from baton.protocol.handoff import Consume, LocalProbe, PrefillResult, Produce

log = logging.getLogger(__name__)

NODES = 16
PROCESSES = 64


class Calls:
    """Writes the calls of one engine."""

    def __init__(self, library: Library, model: Model, loras: Loras, hands_over: bool) -> None:
        self._library = library
        self._model = model
        self._loras = loras
        self._hands_over = hands_over
        # Hand-offs are told apart by who made them; there is nobody to ask for a number, so one is drawn.
        self._node, self._process = secrets.randbelow(NODES), secrets.randbelow(PROCESSES)
        self._warned = False

    def refuse_impossible(self, work: Work, info: EngineInfo) -> None:
        """Raise InvalidRequest or Unsupported for work that this engine can never do."""
        prompt, total = work.token_ids, len(work.token_ids) + work.max_tokens
        if not prompt:
            raise InvalidRequest("token_ids: the prompt is empty")
        highest = max(prompt)
        if min(prompt) < 0 or highest >= self._model.vocabulary:
            raise InvalidRequest(f"token_ids: {highest} is not a token of this model; it has {self._model.vocabulary}")
        if total > info.context_length:
            raise ContextTooLong(f"the request needs {total} tokens; the context is {info.context_length}")
        if work.handoff is None:
            return
        if isinstance(work.handoff, Produce | Consume) and not self._hands_over:
            raise Unsupported("handoff: this engine was not started as a prefill or a decode")
        if isinstance(work.handoff, Produce) and (work.max_tokens != 1 or (work.sampling.n or 1) != 1):
            raise InvalidRequest("max_tokens, n: work that computes KV for others makes one token, for one choice")
        if isinstance(work.handoff, Consume) and engine_choices(work) > 1:
            raise Unsupported("n: TensorRT-LLM goes on from KV of elsewhere with one choice only")

    def fields(self, work: Work) -> GenerateFields13:
        """Return the keywords of the call. Raises InvalidRequest or Unsupported, naming the field."""
        handles = handles_of(work)
        fields = GenerateFields13(
            inputs=_prompt(work, handles),
            sampling_params=sampling_params(work, self._model, self._library),
            streaming=not isinstance(work.handoff, Produce),
        )
        if (work.handoff is not None and self._hands_over) or handles is not None:
            fields["disaggregated_params"] = self._disaggregated(work.handoff, handles)
        if work.dp_rank is not None:
            fields["scheduling_params"] = self._library.scheduling_params(
                attention_dp_rank=work.dp_rank, attention_dp_relax=False
            )
        if work.lora_name is not None:
            fields["lora_request"] = self._loras.request(work.lora_name, self._library)
        if work.cache_salt is not None:
            fields["cache_salt"] = work.cache_salt
        if work.trace_headers:
            fields["trace_headers"] = dict(work.trace_headers)
        if self._library.features.priority:
            fields["priority"] = engine_priority(work.priority)
        elif work.priority and not self._warned:
            self._warned = True
            log.warning("%s TensorRT-LLM 1.2 has no priorities; they count for the router only", work.request_id)
        return fields

    def _disaggregated(self, asked: Produce | Consume | LocalProbe | None, handles: Handles | None) -> object:
        fields = fields_of(handles) if handles is not None else DisaggregatedFields13()
        match asked:
            case Produce():
                fields["request_type"] = handoff.CONTEXT_ONLY
                if (new_id := self._library.new_handoff_id) is not None:
                    fields["disagg_request_id"] = new_id(node_id=self._node, process_id=self._process)
                return self._library.disaggregated_params(**fields)
            case Consume(source=PrefillResult(disaggregated_params=sent)):
                return handoff.decode(sent, self._library)
            case Consume():
                raise Unsupported("bootstrap_info: TensorRT-LLM hands KV over after the prefill, in prefill_result")
            case LocalProbe() | None:
                fields["request_type"] = handoff.WHOLE
                return self._library.disaggregated_params(**fields)


def _prompt(work: Work, handles: Handles | None) -> PromptFields:
    """Return the prompt as the engine is to read it."""
    match work.handoff:
        case Consume(source=PrefillResult(disaggregated_params=sent)):
            # With images the prefill's prompt is longer than the client's, and the KV is that of the prefill's.
            return {"prompt_token_ids": handoff.prompt_of(sent) or list(work.token_ids)}
    if handles is None:
        return {"prompt_token_ids": list(work.token_ids)}
    return BothFields(prompt=handles.prompt, prompt_token_ids=list(work.token_ids))
