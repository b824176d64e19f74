"""The tower of the Qwen2.5-VL layout: 2-D rotary positions, attention in windows, and a merger to the language model.

    patches of a part, as the processor orders them    squares of merge x merge patches, row by row
    patches inside the tower                            the same squares, window by window, full windows first

So the windows of one size are consecutive, and all of them, of all parts, are one attention call. The merger takes
squares; its rows are put back into the order of the processor at the end.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from baton.engines.torch.vision.qwen import QwenConfig
from baton.engines.torch.vision.tower import Carve, activation, attend, heads_of, pair

_EPS = 1e-6
# That of the largest images takes about 40 MB.
_PLANS = 16


class _Block(NamedTuple):
    """The weights of one block; `gate_up` is gate, then up rows. The first of a pair is the weight."""

    norm1: Tensor
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm2: Tensor
    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class _GridPlan(NamedTuple):
    """What depends on the grid of a part alone.

    `order` are the patches in the order of the tower, `row_order` the rows in the order of the processor. `windows` are
    (first patch, windows, patches of a window) for each size of window. `cos` and `sin` are [patch, 1, dimension].
    """

    order: Tensor
    row_order: Tensor
    windows: tuple[tuple[int, int, int], ...]
    cos: Tensor
    sin: Tensor


class QwenTower:
    """A Tower (see `tower.py`)."""

    def __init__(self, config: QwenConfig, tensor: Carve) -> None:
        tower = self._config = config.vision_config
        hidden, ffn = tower.hidden_size, tower.intermediate_size
        merged = hidden * tower.spatial_merge_size**2
        self._activation = activation(tower.hidden_act)
        self._patch = tensor(hidden, 3, tower.temporal_patch_size, tower.patch_size, tower.patch_size)
        self._blocks = [
            _Block(
                norm1=tensor(hidden),
                qkv=(tensor(3 * hidden, hidden), tensor(3 * hidden)),
                out=(tensor(hidden, hidden), tensor(hidden)),
                norm2=tensor(hidden),
                gate_up=(tensor(2 * ffn, hidden), tensor(2 * ffn)),
                down=(tensor(hidden, ffn), tensor(hidden)),
            )
            for _ in range(tower.depth)
        ]
        self._merger_norm = tensor(hidden)
        self._merger_up = tensor(merged, merged), tensor(merged)
        self._merger_out = tensor(tower.out_hidden_size, merged), tensor(tower.out_hidden_size)
        self._plan = functools.lru_cache(maxsize=_PLANS)(self._make_plan)

    @property
    def parts(self) -> dict[str, Tensor]:
        """See `Tower.parts`."""
        parts = {
            "visual.patch_embed.proj.weight": self._patch,
            "visual.merger.ln_q.weight": self._merger_norm,
            **pair("visual.merger.mlp.0", self._merger_up),
            **pair("visual.merger.mlp.2", self._merger_out),
        }
        ffn = self._config.intermediate_size
        for number, block in enumerate(self._blocks):
            prefix = f"visual.blocks.{number}"
            parts |= {f"{prefix}.norm1.weight": block.norm1, f"{prefix}.norm2.weight": block.norm2}
            parts |= pair(f"{prefix}.attn.qkv", block.qkv) | pair(f"{prefix}.attn.proj", block.out)
            parts |= pair(f"{prefix}.mlp.gate_proj", (block.gate_up[0][:ffn], block.gate_up[1][:ffn]))
            parts |= pair(f"{prefix}.mlp.up_proj", (block.gate_up[0][ffn:], block.gate_up[1][ffn:]))
            parts |= pair(f"{prefix}.mlp.down_proj", block.down)
        return parts

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """See `Tower.forward`."""
        plan = self._plan(grid)
        x = F.linear(patches[:, plan.order], self._patch.flatten(1))
        for number, block in enumerate(self._blocks):
            full = number in self._config.fullatt_block_indexes
            x = x + self._attend(block, _normed(x, block.norm1), plan, full)
            gate, up = F.linear(_normed(x, block.norm2), *block.gate_up).chunk(2, dim=-1)
            x = x + F.linear(self._activation(gate) * up, *block.down)
        merged = _normed(x, self._merger_norm).reshape(len(x), len(plan.row_order), -1)
        rows = F.linear(F.gelu(F.linear(merged, *self._merger_up)), *self._merger_out)
        return rows[:, plan.row_order]

    def _attend(self, block: _Block, x: Tensor, plan: _GridPlan, full: bool) -> Tensor:
        q, k, v = heads_of(F.linear(x, *block.qkv), self._config.num_heads)
        q, k = _rotate(q, plan), _rotate(k, plan)
        if full:
            return F.linear(attend(q, k, v).flatten(2), *block.out)
        parts = []
        for first, windows, length in plan.windows:
            cut = [each[:, first : first + windows * length] for each in (q, k, v)]
            attended = attend(*(each.reshape(len(x) * windows, length, *each.shape[2:]) for each in cut))
            parts.append(attended.reshape(len(x), windows * length, -1))
        return F.linear(torch.cat(parts, dim=1), *block.out)

    def _make_plan(self, grid: tuple[int, int]) -> _GridPlan:
        tower, device = self._config, self._patch.device
        merge, square = tower.spatial_merge_size, tower.spatial_merge_size**2
        down, across = grid[0] // merge, grid[1] // merge
        windows = _windows(down, across, tower.window_size // merge // tower.patch_size)
        squares = torch.tensor(list(itertools.chain.from_iterable(windows)))
        order = (squares[:, None] * square + torch.arange(square)).flatten()
        classes, first = [], 0
        for squares_in, group in itertools.groupby(windows, key=len):
            count = len(list(group))
            classes.append((first, count, squares_in * square))
            first += count * squares_in * square
        angles = self._angles(down, across)[order][:, None]
        return _GridPlan(
            order.to(device),
            squares.argsort().to(device),
            tuple(classes),
            torch.cat((angles.cos(), angles.cos()), dim=-1).to(device),
            torch.cat((angles.sin(), angles.sin()), dim=-1).to(device),
        )

    def _angles(self, down: int, across: int) -> Tensor:
        """Return the angles of each patch, in the order of the processor, [patch, half a head]: by height, by width."""
        tower = self._config
        merge, size = tower.spatial_merge_size, tower.hidden_size // tower.num_heads // 2
        theta = tower.rope_parameters.rope_theta if tower.rope_parameters else 10000.0
        frequencies = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        rows, columns = torch.meshgrid(torch.arange(down * merge), torch.arange(across * merge), indexing="ij")
        positions = torch.stack((rows, columns), dim=-1).view(down, merge, across, merge, 2)
        ordered = positions.transpose(1, 2).reshape(-1, 2)
        return (ordered[:, :, None].float() * frequencies).flatten(1)


def _windows(down: int, across: int, side: int) -> list[list[int]]:
    """Return the squares of each window of at most `side` x `side` squares; larger windows come first."""
    windows = [
        [
            row * across + column
            for row in range(top, min(top + side, down))
            for column in range(left, min(left + side, across))
        ]
        for top in range(0, down, side)
        for left in range(0, across, side)
    ]
    return sorted(windows, key=len, reverse=True)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, _EPS)


def _rotate(x: Tensor, plan: _GridPlan) -> Tensor:
    """Rotate each pair (i, i + half) of dimensions of x [part, patch, head, dimension] by the angles of its patch."""
    wide = x.float()
    a, b = wide.chunk(2, dim=-1)
    return (wide * plan.cos + torch.cat((-b, a), dim=-1) * plan.sin).to(x.dtype)
