"""The engine: one running model, below roles. It knows nothing of roles.

`Engine` is the lifecycle that every adapter has. What an engine can do is a port of its own: `GenerateEngine`,
`EmbedEngine`, `EncodeEngine`, and `KvImportEngine` for one whose KV cache other workers read and write. An adapter
implements those that it has and no others. `baton.testing` has a contract suite for each.

Requests that reach an engine have passed admission: prompts are not empty, tokens are in the vocabulary, prompt and
output fit the context, and every option is covered by `Capabilities`. Engines do not repeat those checks.
"""

import enum
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from baton.ports.transfer import BlockMemory, EmbeddingShape
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.handoff import Handoff
from baton.protocol.ids import RequestId
from baton.protocol.media import EncodedItem, Media, MediaFile
from baton.protocol.outputs import Output, PromptProgress, TokenDelta
from baton.protocol.requests import DiffusionOptions, OutputOptions, Sampling, StopConditions


class HandoffStyle(enum.StrEnum):
    """When a prefill knows the address of its KV: before it computes (early), after it (late), or never."""

    NONE = "none"
    EARLY = "early"
    LATE = "late"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do, fixed before it starts. Handlers refuse what is not listed here.

    An engine that `needs_kv` cannot compute prompts: it only continues from KV of another worker. One with
    `guides_after_reasoning` can let a model reason freely before its output follows a guide. `modalities` are those of
    the media files that `submit` takes. With `media_embeddings` it takes `MediaEmbedding`, with `media_handles`
    `MediaHandles`. With `media_encoding` it encodes files of `encoded_modalities`: for other workers, or for itself.
    `diffusion` says that the model is a diffusion language model, `diffusion_options` which fields of
    `DiffusionOptions` a request may set.
    """

    generate: bool = True
    embeddings: bool = False
    media_encoding: bool = False
    media_embeddings: bool = False
    media_handles: bool = False
    encoded_modalities: frozenset[str] = frozenset()
    diffusion: bool = False
    diffusion_options: frozenset[str] = frozenset()
    modalities: frozenset[str] = frozenset({"text"})
    handoff: HandoffStyle = HandoffStyle.NONE
    needs_kv: bool = False
    max_logprobs: int | None = None
    prompt_logprobs: bool = False
    max_choices: int = 1
    guided: frozenset[str] = frozenset()
    guides_after_reasoning: bool = False
    max_thinking_tokens: bool = False
    logit_bias: bool = False
    bad_words: bool = False
    stop_regex: bool = False
    lora: bool = False
    memory_tags: frozenset[str] = frozenset()
    weight_sources: frozenset[str] = frozenset()
    pause_modes: frozenset[str] = frozenset()
    clear_cache: bool = False
    profile: bool = False
    expert_records: bool = False
    dp_size: int = 1


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendered prompt has in the place of a media item: one `token`, which the text `text` becomes.

    `as_text` are the tokens of the same text where a client has typed it: none of them is special. `before` and `after`
    are what the expansion of an item has around its rows, where a client has computed the rows.
    """

    token: int
    text: str
    as_text: tuple[int, ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class MediaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that an engine encodes media to or takes, and its placeholder for each modality."""

    shape: EmbeddingShape
    placeholders: Mapping[str, Placeholder]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine serves, and its limits.

    A step computes at most `max_batch_tokens`. A prompt has at most `max_prompt_tokens`, where that is less than the
    context. `vocab_size` is None if the engine
    cannot tell. `reasoning_end_token` ends the reasoning of a model that reasons. Vectors have `embedding_size`
    numbers, and can be shortened to any number in `embedding_dimensions`. `handoff_host` and `handoff_port` are the
    bootstrap address of an engine that moves KV by itself; `kv` is the KV cache of one that does not. `media` is set if
    the engine encodes media or takes embeddings. An engine that is spread over machines has one leader; its followers
    take no work and only publish readings. `group` identifies the nodes of one engine. `adapters` are LoRA adapters
    that are loaded.
    """

    model_name: str
    model_dir: str
    context_length: int
    block_size: int
    total_blocks: int
    max_running: int
    max_batch_tokens: int | None = None
    max_prompt_tokens: int | None = None
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    reasoning_end_token: int | None = None
    embedding_size: int | None = None
    embedding_dimensions: tuple[int, ...] = ()
    handoff_host: str | None = None
    handoff_port: int | None = None
    kv: BlockMemory | None = None
    media: MediaInfo | None = None
    leader: bool = True
    group: str | None = None
    adapters: tuple[str, ...] = ()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine sees it. `max_tokens` is always set. It has passed admission.

    The placeholder of every `MediaEmbedding` has been replaced by its expansion.
    With `require_reasoning`, its guide applies to what follows `EngineInfo.reasoning_end_token`. `bad_words` are the
    sequences of tokens that the output must not contain.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    media: tuple[Media, ...] = ()
    max_tokens: int
    stop: StopConditions = StopConditions()
    sampling: Sampling = Sampling()
    output: OutputOptions = OutputOptions()
    eos_token_ids: tuple[int, ...] = ()
    handoff: Handoff | None = None
    priority: int = 0
    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    require_reasoning: bool = False
    diffusion: DiffusionOptions = DiffusionOptions()
    bad_words: tuple[tuple[int, ...], ...] = ()
    trace_headers: Mapping[str, str] = {}


class EmbedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed, as tokens. They have passed admission."""

    request_id: RequestId
    inputs: tuple[tuple[int, ...], ...]
    trace_headers: Mapping[str, str] = {}


class EncodeWork(msgspec.Struct, frozen=True, kw_only=True):
    """The media of one prompt to encode, in the order in which the prompt has places for them."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    media: tuple[MediaFile, ...]
    trace_headers: Mapping[str, str] = {}


class EncodedRows(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded item and its rows: `item.rows` times `size` numbers of type `dtype`, contiguous, on the host."""

    item: EncodedItem
    dtype: str
    size: int
    data: memoryview


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """Media that are encoded: as rows that any worker of the model can read, or held by the engine.

    An engine that holds them returns in `params`, as plain JSON, what an engine of the same kind needs to read them.
    """

    items: tuple[EncodedRows, ...] = ()
    params: dict[str, object] | None = None


class Progress(msgspec.Struct, frozen=True, gc=False):
    """Whether the engine makes progress. `steps` grows with every step; work without growth is a stall."""

    steps: int
    running: int
    waiting: int


ReceiveTokens = Callable[[TokenDelta], bool]
"""Takes the new tokens of a choice; returns whether it has taken them."""


class Stream(Protocol):
    """The outputs of one request, for one reader.

    A stream that is read slower than it is filled merges: the next read returns everything since the last one, tokens
    of one choice joined into one delta. So a slow reader costs memory for its tokens and nothing else.
    """

    @property
    def progress(self) -> Sequence[PromptProgress]:
        """What the engine has done with the prompt so far; empty if it does not tell. Bounded, and grows in place."""

    async def read(self, not_before: float = 0.0) -> list[Output]:
        """Wait for outputs and return all of them, oldest first; an empty list means the stream has ended.

        Returns as soon as there is something to return and the loop's clock has reached `not_before` (or a little
        later, while the loop has more to do than it can); the end of the stream is never held back. Raises what the
        stream failed with, after what came before it has been read.
        Cancelling a read loses nothing.
        """

    def pass_to(self, receive: ReceiveTokens, interval_s: float) -> None:
        """From now on, while a read waits, pass tokens to `receive` instead of ending the read, which costs much more.

        Tokens are passed at most once in `interval_s`. Tokens that `receive` does not take end the read, and so do all
        other outputs, with the tokens before them. What it raises fails the stream.
        """

    def fail(self, error: BaseException) -> None:
        """End the stream with `error`, from the event-loop thread. The first end wins; later ones do nothing."""


@runtime_checkable
class Engine(Protocol):
    """The lifecycle of one running model. Every method is called from one event loop and none may block it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do. Valid before `start`."""

    async def start(self) -> EngineInfo:
        """Load the model and begin to step. Raises ConfigError (the model or the options are wrong) or EngineDead."""

    async def execute(self, command: Command) -> Outcome:
        """Execute an operator's command between two steps.

        Called with commands that `capabilities` cover, one at a time; executing one twice has the effect of executing
        it once. Raises InvalidRequest when it cannot be done as asked, or would change KV that other workers read or
        write (then nothing has changed), Unsupported for a combination that only the engine can know, and EngineDead.
        Cancelling the call does not undo it.
        """

    def readings(self) -> AsyncGenerator[Reading, None]:
        """Iterate over load snapshots and KV events, in order and without gaps, until `stop`. One reader."""

    def metrics(self) -> str:
        """Return the engine's own metrics as Prometheus text, under its own names. Any thread, and may read files."""

    def progress(self) -> Progress:
        """Return the step counter. Cheap, and answers even when the engine is stuck."""

    async def stop(self) -> None:
        """End every stream with EngineDead and free everything. Idempotent, and valid after a failed start.

        After it, the memory that `EngineInfo.kv` names must not be accessed.
        """


class AbortableEngine(Engine, Protocol):
    """An engine that holds requests, or what it has computed for them, until they are aborted."""

    async def abort(self, request_id: RequestId) -> None:
        """Stop a request in any phase. Returns when the engine will no longer touch its memory.

        KV that was produced is free again, encoded media are no longer held, and a fetch of KV must have been stopped
        before. Idempotent; an unknown or finished id is no error. The stream ends with Cancelled unless it ended
        before.
        """


@runtime_checkable
class GenerateEngine(AbortableEngine, Protocol):
    """An engine that generates tokens."""

    def submit(self, work: Work) -> Stream:
        """Take `work` in; on return the engine knows it and `abort(work.request_id)` works.

        Raises InvalidRequest or Unsupported for work that can never run, and EngineDead. A request that only has to
        wait is accepted and waits inside.

        Work that *produces* KV has one choice and one token; work that *consumes* KV continues from it. An engine with
        `EngineInfo.kv` reports the blocks. Producing, it yields KvComputed as its prompt is computed, with `complete`
        before its end; the blocks stay as they are, and the id in use, until `abort`, however the stream ends.
        Consuming, it yields one KvWanted when it has blocks for the prompt, or none if it needs nothing; those blocks
        belong to the fetcher until `received` or `abort`.

        An engine without `EngineInfo.kv` moves KV by itself. With an early handoff it connects to its peer at
        `bootstrap`, and the producing stream ends when the KV has been read. With a late handoff it yields
        HandoffReady, and keeps the KV until it has been read or `abort`.
        """


@runtime_checkable
class KvImportEngine(GenerateEngine, Protocol):
    """An engine whose KV cache is `EngineInfo.kv`: other workers' KV is written into it."""

    def received(self, request_id: RequestId) -> None:
        """Continue the request: its KV is where KvWanted asked for it. An unknown or aborted id is no error."""


@runtime_checkable
class EmbedEngine(Engine, Protocol):
    """An engine that turns texts into vectors."""

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        """Return one vector of 32-bit floats for each input. Cancelling the call withdraws the work.

        Raises InvalidRequest for input that the model cannot take, and EngineDead.
        """


@runtime_checkable
class EncodeEngine(AbortableEngine, Protocol):
    """An engine that encodes media, for the workers that compute prompts or for itself."""

    async def encode(self, work: EncodeWork) -> Encoded:
        """Encode the media of a prompt: to rows, one `EncodedRows` for each file, in order, or to handles.

        Handles are held until `abort(work.request_id)`, and the id is in use until then; of rows nothing is held.
        Cancelling the call withdraws the work: nothing is held then. Raises InvalidRequest for media that cannot be
        read or do not fit the prompt, and EngineDead.
        """


@runtime_checkable
class HandleEngine(EncodeEngine, Protocol):
    """An engine that encodes media to handles, whose memory is free only after it has been read once."""

    def mark_unread(self, request_id: RequestId) -> None:
        """No worker has read the handles of this request, and none will: `abort` reads them. Ignores an unknown id."""
