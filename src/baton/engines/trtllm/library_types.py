"""The types of TensorRT-LLM that the adapter uses: exactly the members and keywords that it accesses.

mypy checks the adapter against these types; a contract test checks the types against the recorded facts of every
supported version. A name that ends with 13 adds members that exist since 1.3.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, TypedDict, Unpack

from baton.engines.trtllm.prompt_times import RequestPerfMetrics

SOURCES: dict[str, tuple[str, ...]] = {
    "Logprob": ("executor.result.Logprob",),
    "DisaggregatedParams": ("disaggregated_params.DisaggregatedParams",),
    "CompletionOutput": ("executor.result.CompletionOutput",),
    "Result": ("llmapi.llm.RequestOutput", "executor.result.GenerationResult", "executor.result.GenerationResultBase"),
    "Executor": ("executor.executor.GenerationExecutor",),
    "LibraryEngine": ("llmapi.llm.BaseLLM",),
    "Llm": ("llmapi.llm.BaseLLM",),
    "MetricsCollector": ("metrics.collector.MetricsCollector",),
    "SamplingFields": ("sampling_params.SamplingParams",),
    "GuidedFields": ("sampling_params.GuidedDecodingParams",),
    "DisaggregatedFields": ("disaggregated_params.DisaggregatedParams",),
    "SchedulingFields": ("scheduling_params.SchedulingParams",),
    "LoraFields": ("executor.request.LoRARequest",),
    "GenerateFields": ("llmapi.llm.BaseLLM.generate_async",),
    "TokensPromptFields": ("inputs.data.TokensPrompt",),
    "TextPromptFields": ("inputs.data.TextPrompt",),
    "MediaFields": ("inputs.data.TokensPrompt",),
    "PromptFields": ("inputs.data.TokensPrompt",),
    "MultimodalParams13": ("inputs.multimodal.MultimodalParams",),
    "PreprocessedInputs13": ("llmapi.llm.PreprocessedInputs",),
    "Preprocessor13": ("llmapi.llm.BaseLLM",),
    "EncodeFields": ("llmapi.mm_encoder.MultimodalEncoder.generate_async",),
    "Encoder": ("llmapi.mm_encoder.MultimodalEncoder",),
    "EncodeResult": (
        "llmapi.llm.RequestOutput",
        "executor.result.GenerationResult",
        "executor.result.GenerationResultBase",
    ),
    "SharedTensor": ("_torch.shared_tensor.shared_tensor.SharedTensorContainer",),
    "SharedTensors": ("_torch.shared_tensor.shared_tensor.SharedTensorContainer",),
    "MakeLogprob": ("executor.result.Logprob",),
    "MakeCollector": ("metrics.collector.MetricsCollector",),
    "MakeHandoffId13": ("llmapi.disagg_utils.get_global_disagg_request_id",),
    "LoadVideo": ("inputs.utils.load_video",),
}


class Logprob(Protocol):
    """The log-probability of a token, and its rank among all tokens (from 1)."""

    logprob: float
    rank: int | None


TokenLogprob = Mapping[int, Logprob] | float | None


Handle = dict[str, object]  # of a tensor that other processes can read, as plain JSON


class DisaggregatedParams(Protocol):
    """Parameters that a context-only request returns for its generation-only request, and an encoder for both."""

    first_gen_tokens: list[int] | None
    ctx_request_id: int | None
    opaque_state: bytes | None
    draft_tokens: list[int] | None
    multimodal_embedding_handles: list[Handle] | None
    multimodal_hashes: list[list[int]] | None
    mrope_position_ids_handle: Handle | None
    mrope_position_deltas_handle: Handle | None


class DisaggregatedParams13(DisaggregatedParams, Protocol):
    """The same since 1.3."""

    first_gen_log_probs: Sequence[TokenLogprob] | None
    disagg_request_id: int | None
    ctx_dp_rank: int | None
    ctx_info_endpoint: str | None
    schedule_style: int | None
    ctx_usage: dict[str, object] | None


class CompletionOutput(Protocol):
    """One choice, with all of its tokens so far; the same object at every step."""

    index: int
    token_ids: list[int] | None
    logprobs: Sequence[TokenLogprob] | None
    prompt_logprobs: Sequence[TokenLogprob] | None
    finish_reason: str | None
    stop_reason: int | str | None
    disaggregated_params: DisaggregatedParams | None
    request_perf_metrics: RequestPerfMetrics | None


class Result(Protocol):
    """One request. Iterating yields the object itself after every step; for one reader only."""

    cached_tokens: int
    metrics_dict: dict[object, object]

    @property
    def outputs(self) -> list[CompletionOutput]:
        """Every choice."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the engine computes it, with the tokens that stand for images."""

    @property
    def finished(self) -> bool:
        """Whether no step follows."""

    def abort(self) -> None:
        """Ask the engine to end it; one more step follows."""

    def __aiter__(self) -> AsyncIterator["Result"]: ...


class EncodeResult(Protocol):
    """One request of an encoder. The tensors of its handles are held at least as long as this object is."""

    disaggregated_params: DisaggregatedParams | None

    def abort(self) -> None:
        """Ask the engine to end it. Any thread."""

    def result(self) -> object:
        """Block until it has ended."""


class Executor(Protocol):
    """The executor behind an Llm."""

    def is_shutdown(self) -> bool:
        """Whether it accepts no more requests."""


class SamplingFields(TypedDict, total=False):
    """Keywords of SamplingParams."""

    end_id: int
    max_tokens: int
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    embedding_bias: object
    n: int
    best_of: int
    top_k: int
    top_p: float
    seed: int
    temperature: float
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    length_penalty: float
    min_p: float
    logprobs: int
    prompt_logprobs: int
    guided_decoding: object
    ignore_eos: bool
    detokenize: bool
    add_special_tokens: bool


class SamplingFields13(SamplingFields, total=False):
    """Keywords of SamplingParams since 1.3."""

    thinking_token_budget: int


class GuidedFields(TypedDict, total=False):
    """Keywords of GuidedDecodingParams."""

    json: str | dict[str, object]
    regex: str
    grammar: str
    structural_tag: str


class DisaggregatedFields(TypedDict, total=False):
    """Keywords of DisaggregatedParams."""

    request_type: str
    first_gen_tokens: list[int] | None
    ctx_request_id: int | None
    opaque_state: bytes | None
    draft_tokens: list[int] | None
    multimodal_embedding_handles: list[Handle] | None
    multimodal_hashes: list[list[int]] | None
    mrope_position_ids_handle: Handle | None
    mrope_position_deltas_handle: Handle | None


class DisaggregatedFields13(DisaggregatedFields, total=False):
    """Keywords of DisaggregatedParams since 1.3."""

    first_gen_log_probs: list[TokenLogprob] | None
    disagg_request_id: int | None
    ctx_dp_rank: int | None
    ctx_info_endpoint: str | None
    schedule_style: int | None
    ctx_usage: dict[str, object] | None


class SchedulingFields(TypedDict):
    """Keywords of SchedulingParams."""

    attention_dp_rank: int
    attention_dp_relax: bool


class LoraFields(TypedDict):
    """Keywords of LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class TokensPromptFields(TypedDict, total=False):
    """A prompt of tokens."""

    prompt_token_ids: list[int]


class TextPromptFields(TypedDict, total=False):
    """A prompt of text."""

    prompt: str


class MediaFields(TypedDict, total=False):
    """The media of a prompt, by modality: decoded files, or embeddings."""

    multi_modal_data: Mapping[str, Sequence[object]]
    multi_modal_embeddings: Mapping[str, Sequence[object]]
    mm_processor_kwargs: Mapping[str, object]


class PromptFields(TokensPromptFields, TextPromptFields, MediaFields):
    """A prompt as tokens, as text, or as both, with its media."""


class MultimodalParams13(Protocol):
    """Preprocessed media. Their tensors are in shared memory until the engine, or `to_tensor`, has read them."""

    def to_tensor(self, element: str) -> None:
        """Read the tensors of the field `element` back."""


class PreprocessedInputs13(Protocol):
    """A preprocessed prompt, since 1.3: the tokens as they are computed, with those that stand for media."""

    prompt_token_ids: list[int]
    multimodal_params: MultimodalParams13 | None


class Preprocessor13(Protocol):
    """What preprocesses prompts, since 1.3: an engine or an encoder."""

    def preprocess(
        self, inputs: PromptFields, sampling_params: object = None, disaggregated_params: object = None
    ) -> PreprocessedInputs13:
        """Tokenise the prompt and preprocess its media; slow. Any thread. Sets fields of `disaggregated_params`."""


class EncodeFields(TypedDict):
    """Keywords of an encoder's `generate_async`."""

    inputs: PromptFields | PreprocessedInputs13


class GenerateFields(TypedDict, total=False):
    """Keywords of `generate_async`. Passed by keyword, because versions insert new parameters between old ones."""

    inputs: PromptFields | PreprocessedInputs13
    sampling_params: object
    lora_request: object
    streaming: bool
    disaggregated_params: object
    trace_headers: Mapping[str, str]
    scheduling_params: object
    cache_salt: str


class GenerateFields13(GenerateFields, total=False):
    """Keywords of `generate_async` since 1.3."""

    priority: float


class LibraryEngine(Protocol):
    """What an engine and an encoder have in common."""

    _executor: Executor | None

    def shutdown(self) -> None:
        """Shut down; blocks."""


class LibraryEngine13(LibraryEngine, Protocol):
    """The same since 1.3."""

    def _check_health(self) -> bool:
        """Return whether it is healthy; blocks."""


class Llm(LibraryEngine, Protocol):
    """The library's engine."""

    def generate_async(self, **fields: Unpack[GenerateFields13]) -> Result:
        """Accept a request. Not a coroutine; called on the event loop that will read the result."""

    def get_stats(self, timeout: float) -> list[dict[str, object]]:
        """Return the statistics of each iteration since the last call; blocks up to `timeout` seconds."""

    def get_kv_cache_events(self, timeout: float) -> list[dict[str, object]]:
        """Return the KV events since the last call; blocks up to `timeout` seconds."""


class Llm13(Llm, Preprocessor13, Protocol):
    """The library's engine since 1.3."""

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Return the size of the cache; blocks."""


class Encoder(LibraryEngine, Protocol):
    """The library's encoder of media."""

    def generate_async(self, **fields: Unpack[EncodeFields]) -> EncodeResult:
        """Submit images to the encoder; preprocesses them first, which is slow, unless they are."""


class Encoder13(Encoder, Preprocessor13, Protocol):
    """The library's encoder since 1.3."""


class SharedTensor(Protocol):
    """A tensor of another process."""

    def get_local_view(self) -> object:
        """Open it. The owner counts the reader as done when the returned object is deleted."""


class SharedTensors(Protocol):
    """The class of shared tensors."""

    def from_dict(self, tensor_info: Handle) -> SharedTensor:
        """Return the tensor of a handle."""


class MetricsCollector(Protocol):
    """Counts requests into Prometheus metrics of the process."""


class MetricsCollector12(MetricsCollector, Protocol):
    """Its method in 1.2."""

    def log_metrics_dict(self, metrics_dict: dict[object, object]) -> None:
        """Count a request that has ended."""


class MetricsCollector13(MetricsCollector, Protocol):
    """Its methods since 1.3."""

    def log_request_metrics_dict(self, metrics_dict: dict[object, object]) -> None:
        """Count a request that has ended."""

    def log_iteration_stats(self, iteration_stats: dict[str, object]) -> None:
        """Count an iteration."""


class FieldInfo(Protocol):
    """Pydantic's description of one field."""

    annotation: object


class ArgumentsModel(Protocol):
    """A pydantic class; its constructor checks its keywords."""

    model_fields: Mapping[str, FieldInfo]

    def __call__(self, **fields: object) -> object: ...


class Make(Protocol):
    """A config of the library: pydantic checks its fields."""

    def __call__(self, **fields: object) -> object: ...


class MakeLlm(Protocol):
    """The engine itself: pydantic checks its arguments."""

    def __call__(self, **fields: object) -> Llm: ...


class MakeEncoder(Protocol):
    """The encoder: pydantic checks its arguments."""

    def __call__(self, **fields: object) -> Encoder: ...


class MakeSampling(Protocol):
    """SamplingParams."""

    def __call__(self, **fields: Unpack[SamplingFields13]) -> object: ...


class MakeGuided(Protocol):
    """GuidedDecodingParams."""

    def __call__(self, **fields: Unpack[GuidedFields]) -> object: ...


class MakeDisaggregated(Protocol):
    """DisaggregatedParams."""

    def __call__(self, **fields: Unpack[DisaggregatedFields13]) -> object: ...


class MakeScheduling(Protocol):
    """SchedulingParams."""

    def __call__(self, **fields: Unpack[SchedulingFields]) -> object: ...


class MakeLora(Protocol):
    """LoRARequest."""

    def __call__(self, **fields: Unpack[LoraFields]) -> object: ...


class MakeLogprob(Protocol):
    """Logprob."""

    def __call__(self, *, logprob: float, rank: int | None) -> Logprob: ...


class MakeCollector(Protocol):
    """MetricsCollector."""

    def __call__(self, *, labels: dict[str, str]) -> MetricsCollector: ...


class MakeHandoffId13(Protocol):
    """Returns an id for a handoff, unique among workers; since 1.3."""

    def __call__(self, *, node_id: int, process_id: int) -> int: ...


class LoadVideo(Protocol):
    """Decodes the file of a video to what `multi_modal_data` takes."""

    def __call__(self, *, video: str) -> object: ...
