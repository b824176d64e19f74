"""The generate request, as every role sees it.

Field names are ours; `name=` is the frontend's name where it differs. A field that is null or absent on the wire is
None here. `extra` keeps the keys that this version does not know, so that a forwarded request loses nothing.
"""

import enum
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.extra import Extra, extra_field
from baton.protocol.handoff import Bootstrap, PrefillResult
from baton.protocol.media import MediaItem

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]

_HEXADECIMAL = re.compile("[0-9a-f]{1,16}")


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When to stop. The frontend matches stop strings in token format, the worker in text format."""

    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    stop_token_ids_visible: tuple[TokenId, ...] | None = None
    stop_token_ids_hidden: tuple[TokenId, ...] | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: Count | None = None
    stop_regex: str | tuple[str, ...] | None = None
    extra: Extra = extra_field()


class GuidedDecoding(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: a JSON schema, a regular expression, a list of choices or a grammar."""

    json: object = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: object = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    extra: Extra = extra_field()

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of constraint that are set."""
        constraints = {
            "json": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "structural_tag": self.structural_tag,
        }
        return tuple(kind for kind, value in constraints.items() if value is not None)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. None means the model's default; 0 is a value, never "unset"."""

    n: Choices | None = None
    best_of: Choices | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecoding | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: tuple[str, ...] | None = None
    extra: Extra = extra_field()


class Remasking(enum.StrEnum):
    """How many positions of a block a denoising pass decides, always those of the highest confidence.

    `STATIC` decides an equal share in each pass. `DYNAMIC` decides all above the threshold, and no fewer than `STATIC`.
    """

    STATIC = "low_confidence_static"
    DYNAMIC = "low_confidence_dynamic"


class DiffusionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a diffusion language model decodes. None means the model's default."""

    remasking: Remasking | None = None
    block_length: Positive | None = None
    steps: Positive | None = None
    threshold: Share | None = None
    extra: Extra = extra_field()

    def given(self) -> tuple[str, ...]:
        """Return the names of the options that are set."""
        options = {
            "remasking": self.remasking,
            "block_length": self.block_length,
            "steps": self.steps,
            "threshold": self.threshold,
        }
        return tuple(name for name, value in options.items() if value is not None)


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to return besides the tokens. `logprobs` 0 returns the chosen token only.

    `echo` returns the prompt as text, `return_token_ids` its token ids.
    """

    logprobs: Annotated[int, Meta(ge=0, le=1000)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=1000)] | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    extra: Extra = extra_field()


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of the router, and hints for it."""

    backend_instance_id: int | None = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: Count | None = None
    prefill_dp_rank: Count | None = None
    expected_output_tokens: Count | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    extra: Extra = extra_field()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to generate tokens from tokens."""

    token_ids: tuple[TokenId, ...]
    model: str = ""
    stop: StopConditions = msgspec.field(default=StopConditions(), name="stop_conditions")
    sampling: Sampling = msgspec.field(default=Sampling(), name="sampling_options")
    output: OutputOptions = msgspec.field(default=OutputOptions(), name="output_options")
    eos_token_ids: tuple[TokenId, ...] = ()
    annotations: tuple[str, ...] = ()
    routing: Routing | None = None
    prefill_result: PrefillResult | None = None
    bootstrap: Bootstrap | None = msgspec.field(default=None, name="bootstrap_info")
    media: dict[str, tuple[MediaItem, ...]] | None = msgspec.field(default=None, name="multi_modal_data")
    encoder_result: dict[str, object] | None = None
    diffusion: DiffusionOptions | None = None
    require_reasoning: bool | None = None
    extra_args: dict[str, object] | None = None
    extra: Extra = extra_field()

    @property
    def choices(self) -> int:
        """The number of choices to generate."""
        return self.sampling.n or 1

    @property
    def scores_only(self) -> bool:
        """Whether only the log-probabilities of the prompt are asked for."""
        return self.stop.max_tokens == 0 and self.output.prompt_logprobs is not None

    @property
    def cache_salt(self) -> str | None:
        """The tenant whose prefix cache the request uses; requests with other salts share no KV block with it."""
        if self.routing is not None and self.routing.cache_salt:
            return self.routing.cache_salt
        extensions = (self.extra_args or {}).get("nvext")
        salt = extensions.get("cache_salt") if isinstance(extensions, dict) else None
        return salt if isinstance(salt, str) and salt else None

    @property
    def image_routing_hashes(self) -> tuple[str, ...]:
        """What the frontend's router knows the images by, in the order of the prompt; empty if it tells none apart."""
        hashes = (self.extra_args or {}).get("mm_hashes")
        found = tuple(one for one in hashes if isinstance(one, str)) if isinstance(hashes, list | tuple) else ()
        return found if all(_HEXADECIMAL.fullmatch(one) for one in found) else ()

    def with_prompt(self, token_ids: tuple[int, ...]) -> "GenerateRequest":
        """Return the request with another prompt."""
        return self if token_ids is self.token_ids else msgspec.structs.replace(self, token_ids=token_ids)

    def for_prefill(self) -> "GenerateRequest":
        """Return the request that computes the KV of the prompt and one token, for one choice.

        The worker that decodes returns what the request asks to know of its prompt.
        """
        stop = msgspec.structs.replace(self.stop, max_tokens=1, min_tokens=None)
        sampling = msgspec.structs.replace(self.sampling, n=1, best_of=None, bad_words=None)
        output = msgspec.structs.replace(self.output, prompt_logprobs=None, echo=None, return_token_ids=None)
        return msgspec.structs.replace(self, stop=stop, sampling=sampling, output=output)

    def for_scoring(self) -> "GenerateRequest":
        """Return the request that scores the prompt: engines compute log-probabilities with a first token."""
        stop = msgspec.structs.replace(self.stop, max_tokens=1, min_tokens=None)
        sampling = msgspec.structs.replace(self.sampling, n=1, best_of=None, guided_decoding=None)
        return msgspec.structs.replace(self, stop=stop, sampling=sampling)
