"""The engine: what turns tokens into tokens. It sits below roles and knows nothing of them.

A handler owns the request; an adapter owns the engine. `baton.testing.EngineContract` checks every rule here.
"""

import enum
from array import array
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import msgspec

from baton.ports.transfer import KvMemory
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.handoff import Handoff
from baton.protocol.ids import RequestId
from baton.protocol.media import Media, MediaFile
from baton.protocol.outputs import Output
from baton.protocol.requests import OutputOptions, Sampling, StopConditions


class HandoffStyle(enum.StrEnum):
    """When a prefill knows where its KV can be fetched."""

    NONE = "none"
    EARLY = "early"
    LATE = "late"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do, told once. A handler refuses what is not here; an adapter never ignores an option.

    One that `needs_kv` cannot compute a prompt: it only goes on from KV that comes from elsewhere.
    """

    generate: bool = True
    embeddings: bool = False
    media_encoding: bool = False
    media_handles: bool = False
    diffusion: bool = False
    modalities: frozenset[str] = frozenset({"text"})
    handoff: HandoffStyle = HandoffStyle.NONE
    needs_kv: bool = False
    max_logprobs: int | None = None
    prompt_logprobs: bool = False
    max_choices: int = 1
    guided: frozenset[str] = frozenset()
    logit_bias: bool = False
    lora: bool = False
    memory_tags: frozenset[str] = frozenset()
    weight_sources: frozenset[str] = frozenset()
    pause_modes: frozenset[str] = frozenset()
    clear_cache: bool = False
    profile: bool = False
    expert_records: bool = False
    dp_size: int = 1


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine serves, and with how much room.

    `handoff_host` and `handoff_port` are where engines that move KV by themselves meet; `kv` is the memory of one that
    does not. An engine that is spread over machines has one leader; the others take no work, and only tell readings.
    What its nodes have in common, and no other engine has, is its `group`.
    """

    model_name: str
    model_dir: str
    context_length: int
    block_size: int
    total_blocks: int
    max_running: int
    eos_token_ids: tuple[int, ...] = ()
    embedding_size: int | None = None
    handoff_host: str | None = None
    handoff_port: int | None = None
    kv: KvMemory | None = None
    leader: bool = True
    group: str | None = None


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine sees it. `max_tokens` is always set; limits have been checked."""

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
    trace_headers: Mapping[str, str] = {}


class EmbedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed, as tokens. Limits have been checked."""

    request_id: RequestId
    inputs: tuple[tuple[int, ...], ...]
    trace_headers: Mapping[str, str] = {}


class EncodeWork(msgspec.Struct, frozen=True, kw_only=True):
    """The media of one prompt to encode, in the order in which the prompt has places for them."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    media: tuple[MediaFile, ...]
    trace_headers: Mapping[str, str] = {}


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """Media that are encoded and held: what an engine that computes the prompt needs to read them, as plain JSON."""

    params: dict[str, object]


class Progress(msgspec.Struct, frozen=True, gc=False):
    """Whether the engine moves. `steps` grows with every step; work without growth is a stall."""

    steps: int
    running: int
    waiting: int


class Stream(Protocol):
    """The outputs of one request, for one reader.

    A stream that is read slower than it is filled merges: the next read returns everything since the last one, tokens
    of one choice joined into one delta. So a slow reader costs memory for its tokens and nothing else.
    """

    async def read(self, not_before: float = 0.0) -> list[Output]:
        """Wait for outputs and return all of them, oldest first; an empty list means the stream has ended.

        Returns as soon as there is something to return and the loop's clock has reached `not_before`; the end of the
        stream is never held back. Raises what the stream failed with, after what came before it has been read.
        Cancelling a read loses nothing.
        """

    def fail(self, error: BaseException) -> None:
        """End the stream with `error`, from the event-loop thread. The first end wins; later ones do nothing."""


class Engine(Protocol):
    """One running model. Every method is called from one event loop and none may block it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do. Valid before `start`."""

    async def start(self) -> EngineInfo:
        """Load the model and begin to step. Raises ConfigError (the model or the options are wrong) or EngineDead."""

    def submit(self, work: Work) -> Stream:
        """Take `work` in; on return the engine knows it and `abort(work.request_id)` works.

        Raises InvalidRequest or Unsupported for work that can never run, and EngineDead. A request that only has to
        wait is accepted and waits inside.

        Work that *produces* KV has one choice and one token, and work that *consumes* KV goes on from it. An engine
        with `EngineInfo.kv` says what is to be moved. Produced, it yields KvComputed as its prompt is computed, with
        `complete` before its end; the blocks stay as they are, and its id in use, until `abort`, however its stream
        ends. Consumed, it yields one KvWanted when it has room, or none if it needs nothing; those blocks are the
        fetcher's until `received` or `abort`.

        An engine without moves KV by itself. One that hands over early meets the other at `bootstrap`, and its
        stream ends when the KV has been taken. One that hands over late yields HandoffReady, and keeps the KV until it
        has been taken or `abort`.
        """

    def received(self, request_id: RequestId) -> None:
        """The KV is where KvWanted said; the work goes on. An unknown or aborted id is no error."""

    async def abort(self, request_id: RequestId) -> None:
        """Stop a request in any phase. Returns when the engine will no longer touch its memory.

        KV that was lent is free again, media that were encoded are no longer held, and KV that is being fetched must
        have been given up before. Idempotent; an unknown or finished id is no error. The stream ends with Cancelled
        unless it ended before.
        """

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        """Return one vector of 32-bit floats for each input. Cancelling the call takes the work back.

        Raises InvalidRequest for tokens the model does not have, Unsupported from an engine that does not embed,
        and EngineDead.
        """

    async def encode(self, work: EncodeWork) -> Encoded:
        """Encode the media of a prompt, and hold them until `abort(work.request_id)`; its id is in use until then.

        Cancelling the call takes the work back: nothing is held then. Raises InvalidRequest for media that cannot be
        read or do not fit the prompt, Unsupported from an engine that does not encode, and EngineDead.
        """

    async def execute(self, command: Command) -> Outcome:
        """Do what an operator asks, between two steps; calls are done one after the other.

        Raises Unsupported for a verb, a tag or a source that `capabilities` do not list, InvalidRequest when it
        cannot be done as asked, or would change KV that others read or write (then nothing has changed), and
        EngineDead. Cancelling the call does not undo it.
        """

    def readings(self) -> AsyncGenerator[Reading, None]:
        """Iterate over load snapshots and KV events, in order and without gaps, until `stop`. One reader."""

    def metrics(self) -> str:
        """Return the engine's own metrics as Prometheus text, under its own names. Any thread, and may read files."""

    def progress(self) -> Progress:
        """Tell whether the engine moves. Cheap, and answers even when the engine is stuck."""

    async def stop(self) -> None:
        """End every stream with EngineDead and free everything. Idempotent, and valid after a failed start.

        From now on nobody may use what `EngineInfo.kv` names.
        """
