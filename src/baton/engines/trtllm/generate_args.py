"""The arguments of the library's `generate_async` for one request: by keyword, and only those that are needed."""

import secrets

from baton.engines.trtllm import handoff
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import (
    DisaggregatedFields13,
    GenerateFields13,
    TokensAndTextFields,
    TokensPromptFields,
)
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.media_handles import Handles, fields_of, handles_of
from baton.engines.trtllm.params import Model, engine_choices, engine_priority, sampling_params
from baton.errors import InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, PrefillResult, Produce

NODES = 16
PROCESSES = 64


class GenerateArgs:
    """Builds the arguments for the requests of one engine; `disaggregated` if it can produce or consume KV."""

    def __init__(self, library: Library, model: Model, loras: Loras, disaggregated: bool) -> None:
        self._library = library
        self._model = model
        self._loras = loras
        self._disaggregated = disaggregated
        # Handoff ids contain the worker that produced the KV; nothing assigns workers a number, so it is random.
        self._node, self._process = secrets.randbelow(NODES), secrets.randbelow(PROCESSES)

    def build(self, work: Work) -> GenerateFields13:
        """Return the arguments. Raises InvalidRequest or Unsupported, naming the field."""
        _refuse_choices(work)
        handles = handles_of(work)
        fields = GenerateFields13(
            inputs=_prompt(work, handles),
            sampling_params=sampling_params(work, self._model, self._library),
            streaming=not isinstance(work.handoff, Produce),
        )
        if (work.handoff is not None and self._disaggregated) or handles is not None:
            fields["disaggregated_params"] = self._disaggregated_params(work, handles)
        self._add_routing(fields, work)
        self._add_priority(fields, work)
        return fields

    def _add_routing(self, fields: GenerateFields13, work: Work) -> None:
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

    def _add_priority(self, fields: GenerateFields13, work: Work) -> None:
        if self._library.features.priority:
            fields["priority"] = engine_priority(work.priority)
        elif work.priority:
            raise Unsupported("priority: TensorRT-LLM 1.2 has none, 1.3 has; send the request without it")

    def _disaggregated_params(self, work: Work, handles: Handles | None) -> object:
        fields = fields_of(handles) if handles is not None else DisaggregatedFields13()
        match work.handoff:
            case Produce():
                fields["request_type"] = handoff.CONTEXT_ONLY
                if (new_id := self._library.new_handoff_id) is not None:
                    fields["disagg_request_id"] = new_id(node_id=self._node, process_id=self._process)
            case Consume(source=PrefillResult(disaggregated_params=params)):
                return handoff.decode(params, self._library)
            case Consume():
                raise Unsupported("bootstrap_info: TensorRT-LLM hands KV off after the prefill, in prefill_result")
            case _:
                fields["request_type"] = handoff.CONTEXT_AND_GENERATION
        return self._library.disaggregated_params(**fields)


def _refuse_choices(work: Work) -> None:
    if isinstance(work.handoff, Produce) and (work.max_tokens != 1 or (work.sampling.n or 1) != 1):
        raise InvalidRequest("max_tokens, n: work that produces KV generates one token of one choice")
    if isinstance(work.handoff, Consume) and engine_choices(work) > 1:
        raise Unsupported("n: TensorRT-LLM continues from another worker's KV with one choice only")


def _prompt(work: Work, handles: Handles | None) -> TokensPromptFields:
    match work.handoff:
        case Consume(source=PrefillResult(disaggregated_params=params)):
            # With images the prefill's prompt is longer than the client's, and its KV is of the longer one.
            return {"prompt_token_ids": handoff.prompt_of(params) or list(work.token_ids)}
    if handles is None:
        return {"prompt_token_ids": list(work.token_ids)}
    return TokensAndTextFields(prompt=handles.prompt, prompt_token_ids=list(work.token_ids))
