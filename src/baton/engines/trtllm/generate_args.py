"""The arguments of the library's `generate_async` for one request: by keyword, and only those that are needed.

Since 1.3, prompts with media are preprocessed first, on a thread: `prepare`.
"""

import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from baton.engines.trtllm import handoff
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import (
    DisaggregatedFields13,
    DisaggregatedParams,
    GenerateFields13,
    PreprocessedInputs13,
    Preprocessor13,
    PromptFields,
)
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.media_handles import Handles, fields_of, handles_of
from baton.engines.trtllm.media_prompt import MediaPrompts
from baton.engines.trtllm.params import Model, engine_choices, engine_priority, sampling_params
from baton.errors import BatonError, ContextTooLong, EngineFailed, InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, PrefillResult, Produce
from baton.protocol.media import MediaEmbedding

NODES = 16
PROCESSES = 64


class GenerateArgs:
    """Builds the arguments for the requests of one engine; `disaggregated` if it can produce or consume KV.

    A request has at most `context` tokens. `media` is None for an engine that gets no media yet.
    """

    def __init__(
        self,
        library: Library,
        model: Model,
        loras: Loras,
        disaggregated: bool,
        context: int,
        media: MediaPrompts | None = None,
    ) -> None:
        self._library = library
        self._model = model
        self._loras = loras
        self._disaggregated = disaggregated
        self.context = context
        self._media = media
        # Handoff ids contain the worker that produced the KV; nothing assigns workers a number, so it is random.
        self._node, self._process = secrets.randbelow(NODES), secrets.randbelow(PROCESSES)

    def needs_preparation(self, work: Work) -> bool:
        """Whether `prepare` is to be called, and not `build`. Raises InvalidRequest or Unsupported for bad media."""
        if not has_media(work):
            return False
        assert self._media is not None
        handles_of(work)
        self._media.check(work.media)
        if work.output.prompt_logprobs is not None and not isinstance(work.media[0], MediaEmbedding):
            raise Unsupported("prompt_logprobs: TensorRT-LLM expands the media of the prompt, so its tokens differ")
        return self._library.features.preprocessing

    def build(self, work: Work) -> GenerateFields13:
        """Return the arguments. Raises InvalidRequest, Unsupported or ContextTooLong, naming the field."""
        prompt = self._prompt(work)
        tokens = prompt["prompt_token_ids"]
        return self._fields(self._limited(work, tokens) if _consumes(work) else work, prompt)

    def prepare(self, work: Work, preprocessor: Preprocessor13) -> GenerateFields13:
        """Return the arguments for work with media, preprocessed. Slow: call it on a thread.

        Raises InvalidRequest for media that cannot be read or do not fit the prompt, ContextTooLong, and EngineFailed
        when the library cannot preprocess what has been read.
        """
        assert self._media is not None
        prompt = self._media.build(work.token_ids, work.media)
        fields = self._fields(work, prompt)
        inputs = self._preprocess(preprocessor, prompt, fields)
        try:
            if isinstance(work.media[0], MediaEmbedding) and len(inputs.prompt_token_ids) != len(work.token_ids):
                raise EngineFailed(
                    f"TensorRT-LLM expands the media of the prompt to {len(inputs.prompt_token_ids)} tokens, and their"
                    f" encoder to {len(work.token_ids)}"
                )
            limited = self._limited(work, inputs.prompt_token_ids)
        except BatonError:
            discard(inputs)
            raise
        fields["sampling_params"] = sampling_params(limited, self._model, self._library)
        fields["inputs"] = inputs
        return fields

    def _preprocess(
        self, preprocessor: Preprocessor13, prompt: PromptFields, fields: GenerateFields13
    ) -> PreprocessedInputs13:
        try:
            return preprocessor.preprocess(
                inputs=prompt,
                sampling_params=fields["sampling_params"],
                disaggregated_params=fields.get("disaggregated_params"),
            )
        except NotImplementedError as error:
            raise Unsupported(f"media: TensorRT-LLM does not take these for this model: {error}") from error
        except Exception as error:
            raise EngineFailed(f"TensorRT-LLM cannot preprocess the media: {error!r}") from error

    def _limited(self, work: Work, prompt: Sequence[int]) -> Work:
        """Return `work` with an output that fits the context after `prompt`, which can be longer than the client's."""
        rest = self.context - len(prompt)
        if rest < 1:
            raise ContextTooLong(
                f"multi_modal_data: this model's maximum context length is {self.context} tokens; the prompt with its"
                f" media has {len(prompt)}"
            )
        return msgspec.structs.replace(work, max_tokens=min(work.max_tokens, rest))

    def _fields(self, work: Work, prompt: PromptFields) -> GenerateFields13:
        _refuse_choices(work)
        handles = None if _consumes(work) else handles_of(work)
        fields = GenerateFields13(
            inputs=prompt,
            sampling_params=sampling_params(work, self._model, self._library),
            streaming=not isinstance(work.handoff, Produce),
        )
        if (work.handoff is not None and self._disaggregated) or handles is not None:
            fields["disaggregated_params"] = self._disaggregated_params(work, handles)
        self._add_routing(fields, work)
        self._add_priority(fields, work)
        return fields

    def _prompt(self, work: Work) -> PromptFields:
        match work.handoff:
            case Consume(source=PrefillResult(disaggregated_params=params)):
                # With media the prefill's prompt is longer than the client's, and its KV is of the longer one.
                return {"prompt_token_ids": handoff.prompt_of(params) or list(work.token_ids)}
        if has_media(work) and self._media is not None:
            return self._media.build(work.token_ids, work.media)
        return {"prompt_token_ids": list(work.token_ids)}

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


def has_media(work: Work) -> bool:
    """Whether the engine reads media. Where the KV comes from another worker, they are in the KV."""
    return bool(work.media) and not _consumes(work)


def sent_params(fields: GenerateFields13) -> DisaggregatedParams | None:
    """Return the library's parameters in the arguments; preprocessing has added to them."""
    return cast(DisaggregatedParams | None, fields.get("disaggregated_params"))


def discard(inputs: PromptFields | PreprocessedInputs13) -> None:
    """Free the shared memory of preprocessed media that are not submitted: read, it belongs to nobody else."""
    if not isinstance(inputs, dict) and (media := inputs.multimodal_params) is not None:
        media.to_tensor("multimodal_data")


def _consumes(work: Work) -> bool:
    return isinstance(work.handoff, Consume)


def _refuse_choices(work: Work) -> None:
    if isinstance(work.handoff, Produce) and (work.max_tokens != 1 or (work.sampling.n or 1) != 1):
        raise InvalidRequest("max_tokens, n: work that produces KV generates one token of one choice")
    if isinstance(work.handoff, Consume) and engine_choices(work) > 1:
        raise Unsupported("n: TensorRT-LLM continues from another worker's KV with one choice only")
