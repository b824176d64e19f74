"""What a request yields: engine outputs on the inside, chunks on the wire."""

import enum
from typing import Literal

import msgspec

# For each token of a prompt: itself and its alternatives by token id; None for the first.
PromptLogprobs = list[dict[str, dict[str, object]] | None]


class FinishReason(enum.StrEnum):
    """The finish reasons of the wire format. A failure is an error, not a finish reason."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    CONTENT_FILTER = "content_filter"


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One alternative at a position, best rank first (rank 1)."""

    rank: int
    token_id: int
    logprob: float
    token: str | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities aligned one to one with the tokens of the delta that carries them."""

    chosen: tuple[float, ...]
    top: tuple[tuple[TopLogprob, ...], ...] = ()


class TokenDelta(msgspec.Struct, frozen=True):
    """New tokens of one choice, never repeated."""

    token_ids: list[int]
    index: int = 0
    logprobs: Logprobs | None = None


class PromptCached(msgspec.Struct, frozen=True, gc=False):
    """How many tokens of the prompt were in the prefix cache. Comes once, with the first tokens.

    `prompt_tokens` is the length of the prompt, from an engine that expands the media in it by itself.
    """

    tokens: int
    prompt_tokens: int | None = None


class PromptScored(msgspec.Struct, frozen=True):
    """The log-probabilities of the prompt, from its second token on. Comes once, with the first tokens."""

    logprobs: Logprobs


class Finished(msgspec.Struct, frozen=True):
    """One choice has ended. The stream ends when every choice has."""

    reason: FinishReason
    index: int = 0
    stop_reason: int | str | None = None
    cached_tokens: int | None = None


class HandoffReady(msgspec.Struct, frozen=True):
    """A prefill's KV can be claimed with these parameters."""

    params: dict[str, object]


class KvComputed(msgspec.Struct, frozen=True):
    """More blocks of a prompt have their KV, in the order of the prompt; `complete` marks the last ones."""

    blocks: tuple[int, ...]
    complete: bool = False
    cached_tokens: int = 0


class KvWanted(msgspec.Struct, frozen=True):
    """A prompt has blocks for its KV, from its block number `first` on; the blocks before are in the prefix cache."""

    first: int
    blocks: tuple[int, ...]


class PromptProgress(msgspec.Struct, frozen=True, gc=False):
    """What an engine has done with a prompt when `time.perf_counter_ns()` was `at_ns`.

    "queued": it waits for a step. "first_step": its first step has begun. "prefill_chunk": a step has computed `tokens`
    of it.
    """

    at_ns: int
    phase: Literal["queued", "first_step", "prefill_chunk"]
    tokens: int = 0


Output = PromptCached | PromptScored | TokenDelta | HandoffReady | KvComputed | KvWanted | Finished


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of a whole request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class PromptData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request asks to know of its prompt, sent once, before its tokens.

    `text` is the decoded prompt, special tokens included; `tokens` are the texts of its tokens and `offsets` the places
    in `text` where they begin. `logprobs` have a null for the first token, else the log-probability of the token and
    those of its alternatives, by token id.
    """

    token_ids: list[int] | None = msgspec.field(default=None, name="prompt_token_ids")
    text: str | None = msgspec.field(default=None, name="prompt_text")
    tokens: list[str] | None = msgspec.field(default=None, name="prompt_tokens")
    offsets: list[int] | None = msgspec.field(default=None, name="prompt_offsets")
    logprobs: PromptLogprobs | None = msgspec.field(default=None, name="prompt_logprobs")


class Chunk(msgspec.Struct, frozen=True):
    """One message from worker to frontend: new tokens of one choice; the last has the finish reason.

    The first and the last have the usage: a frontend that finds a stop string reads no further.
    """

    token_ids: list[int]
    index: int = 0
    logprobs: Logprobs | None = msgspec.field(default=None, name="log_probs, top_logprobs")
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = msgspec.field(default=None, name="completion_usage")
    disaggregated_params: dict[str, object] | None = None
    prompt: PromptData | None = msgspec.field(default=None, name="engine_data")
    encoder_result: dict[str, object] | None = None
