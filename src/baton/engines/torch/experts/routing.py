"""Which experts the rows of a step used, as the recorder reads it."""

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engines.torch.models.sparse import RoutedLayer


class Routing(NamedTuple):
    """The logical experts of each row of a step, and the slots that computed them: int32 [sparse layers, rows, n].

    Rows are in the order of the batch: prefills, then decodes. The next step may overwrite the tensors.
    """

    experts: Tensor
    slots: Tensor


def stack_layers(layers: list[RoutedLayer]) -> Routing:
    """Return the routing of a pass from that of its sparse layers."""
    experts, slots = zip(*layers, strict=True)
    return Routing(torch.stack(experts).to(torch.int32), torch.stack(slots))


def join_passes(passes: list[Routing]) -> Routing | None:
    """Return the routing of a step from that of its passes, None without any."""
    if len(passes) < 2:
        return passes[0] if passes else None
    experts, slots = zip(*passes, strict=True)
    return Routing(torch.cat(experts, dim=1), torch.cat(slots, dim=1))
