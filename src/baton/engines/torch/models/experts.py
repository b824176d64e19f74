"""The experts of a mixture-of-experts model: their shape in config.json, and their names in the model's files.

Knows no tensors. What the engine does not compute is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from baton.errors import ConfigError

# Families whose sparse layers have experts; the second also has an expert that every token uses.
SPARSE_FAMILIES = frozenset({"qwen3_moe", "qwen2_moe"})
_SHARING_FAMILIES = frozenset({"qwen2_moe"})


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of each sparse layer: a token uses `per_token` of `count`, and the shared expert if there is one.

    `layers` are the numbers of the sparse layers; the others are dense. `normalised` says whether the weights of a
    token's experts add up to 1. `groups` are the groups of experts that should stay together, 0 without groups.
    """

    count: int
    per_token: int
    ffn: int
    shared_ffn: int
    normalised: bool
    layers: tuple[int, ...]
    groups: int = 0


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of config.json, with the defaults that they have where a file leaves them out."""

    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    n_group: int | None = None
    topk_group: int | None = None
    scoring_func: str = "softmax"
    routed_scaling_factor: float | None = None

    @property
    def count(self) -> int:
        """The number of experts, which has two names."""
        return (self.num_experts if self.num_experts is not None else self.num_local_experts) or 0


def read_experts(content: Mapping[str, object], family: str, layers: int, source: object) -> ExpertShape | None:
    """Return the experts of a model, None for a dense one; `source` is the file that messages name.

    Raises ConfigError for what is not supported and msgspec.ValidationError for fields of wrong types.
    """
    if family not in SPARSE_FAMILIES:
        return None
    fields = msgspec.convert(content, _Fields)
    _refuse(fields, family, source)
    dense = set(fields.mlp_only_layers or ())
    sparse = tuple(
        number for number in range(layers) if number not in dense and (number + 1) % fields.decoder_sparse_step == 0
    )
    if not sparse:
        return None
    return ExpertShape(
        count=fields.count,
        per_token=fields.num_experts_per_tok,
        ffn=fields.moe_intermediate_size,
        shared_ffn=fields.shared_expert_intermediate_size if family in _SHARING_FAMILIES else 0,
        normalised=fields.norm_topk_prob,
        layers=sparse,
        groups=fields.n_group or 0,
    )


def _refuse(fields: _Fields, family: str, source: object) -> None:
    sizes = {
        "num_experts": fields.count,
        "num_experts_per_tok": fields.num_experts_per_tok,
        "moe_intermediate_size": fields.moe_intermediate_size,
        "decoder_sparse_step": fields.decoder_sparse_step,
    }
    if family in _SHARING_FAMILIES:
        sizes["shared_expert_intermediate_size"] = fields.shared_expert_intermediate_size
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{source}: {name} is missing or not positive")
    if fields.num_experts_per_tok > fields.count:
        raise ConfigError(f"{source}: num_experts_per_tok {fields.num_experts_per_tok} of {fields.count} experts")
    _refuse_routers(fields, source)


def _refuse_routers(fields: _Fields, source: object) -> None:
    groups = fields.n_group or 0
    if fields.scoring_func != "softmax":
        raise ConfigError(f"{source}: scoring_func {fields.scoring_func!r} is not supported; only softmax is")
    if fields.routed_scaling_factor not in (None, 1.0):
        raise ConfigError(f"{source}: routed_scaling_factor {fields.routed_scaling_factor} is not supported; only 1 is")
    if (fields.topk_group or groups) < groups:
        raise ConfigError(f"{source}: topk_group {fields.topk_group} of {fields.n_group} groups is not supported")


class FusedPart(NamedTuple):
    """The tensor `name` of one expert inside a tensor of all experts, from element `start` on."""

    name: str
    start: int
    shape: tuple[int, ...]


_FUSED = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)(?P<kind>gate_up_proj|down_proj)$")


def fused_parts(name: str, shape: tuple[int, ...]) -> Iterator[FusedPart]:
    """Yield the tensors of single experts in a tensor that has those of all, as newer files may; none for others."""
    match = _FUSED.fullmatch(name)
    if match is None or len(shape) != 3 or (match["kind"] == "gate_up_proj" and shape[1] % 2):
        return
    kinds = ("gate_proj", "up_proj") if match["kind"] == "gate_up_proj" else ("down_proj",)
    experts, rows, width = shape
    rows //= len(kinds)
    for number in range(experts * len(kinds)):
        expert, kind = divmod(number, len(kinds))
        part = f"{match['prefix']}{expert}.{kinds[kind]}.weight"
        yield FusedPart(part, number * rows * width, (rows, width))
