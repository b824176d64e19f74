"""How one request of a diffusion language model is decoded, with the model's defaults filled in. Knows no torch."""

import msgspec

from baton.engines.torch.models.diffusion import DiffusionConfig
from baton.errors import InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.requests import DiffusionOptions, Remasking, Sampling

_NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


class DecodingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the blocks of one request are decoded.

    `variant` distinguishes KV that was computed with blocks of another length than the model's own: in them a token
    sees other tokens.
    """

    block_length: int
    mask_token: int
    remasking: Remasking
    steps: int
    threshold: float
    variant: str = ""

    def quota(self, masks: int, passes: int) -> int:
        """Return how many of `masks` positions the pass after `passes` passes decides at least.

        An equal share in each of `steps` passes; the first ones decide one more where the shares are not whole.
        """
        steps = min(self.steps, masks)
        return masks // steps + (passes < masks % steps)

    def select(self, confidences: list[float], quota: int) -> list[int]:
        """Return the indexes of the positions to decide: the highest confidences first, of equal ones the leftmost."""
        order = sorted(range(len(confidences)), key=lambda index: (-confidences[index], index))
        count = quota
        if self.remasking is Remasking.DYNAMIC:
            count = max(quota, sum(confidence > self.threshold for confidence in confidences))
        return order[:count]


def make_plan(work: Work, model: DiffusionConfig, page: int) -> DecodingPlan:
    """Return how `work` is decoded on an engine with KV blocks of `page` tokens. Raises InvalidRequest, Unsupported."""
    options = work.diffusion
    length = options.block_length or model.block_length
    remasking = options.remasking or model.remasking
    _refuse_penalties(work.sampling)
    _check(options, length, remasking, page)
    return DecodingPlan(
        block_length=length,
        mask_token=model.mask_token,
        remasking=remasking,
        steps=options.steps or min(model.steps or length, length),
        threshold=model.threshold if options.threshold is None else options.threshold,
        variant="" if length == model.block_length else f"block_length={length}",
    )


def _check(options: DiffusionOptions, length: int, remasking: Remasking, page: int) -> None:
    """Raise InvalidRequest for options that do not fit each other or the engine."""
    if page % length:
        raise InvalidRequest(
            f"diffusion.block_length: {length} does not divide the {page} tokens of a KV block; choose a divisor, or"
            " start the worker with another --torch-block-size"
        )
    if options.steps is not None and options.steps > length:
        raise InvalidRequest(f"diffusion.steps: {options.steps} is more than the {length} positions of a block")
    if options.threshold is not None and remasking is not Remasking.DYNAMIC:
        raise InvalidRequest(f"diffusion.threshold: it applies to the remasking {Remasking.DYNAMIC} only")


def without_penalties(defaults: SamplingDefaults) -> SamplingDefaults:
    """Return the sampling defaults of a diffusion language model: a penalty depends on the tokens before a position."""
    return msgspec.structs.replace(defaults, repetition_penalty=None)


def _refuse_penalties(sampling: Sampling) -> None:
    for name, neutral in _NO_PENALTY.items():
        if getattr(sampling, name) not in (None, neutral):
            raise Unsupported(
                f"{name}: a diffusion language model has no penalties: it decides its tokens in any order"
            )
