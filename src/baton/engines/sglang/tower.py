"""SGLang's vision tower in this process: its own `--encoder-only` mode, without the language model and its servers.

All methods block and belong to one thread.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from baton.config.owned_directory import owned_directory
from baton.engines.sglang.launch import restored_settings
from baton.engines.sglang.preprocessing import Patches
from baton.engines.sglang.server_args import Arguments, make_server_args
from baton.errors import BatonError, ConfigError, EngineDead

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Tower:
    """A loaded tower. A process has one at a time. Raises ConfigError or EngineDead."""

    def __init__(self, arguments: Arguments) -> None:
        from sglang.srt.disaggregation.encoder.server import MMEncoder
        from sglang.srt.runtime_context import publish

        server_args = make_server_args(arguments, {})
        self._files = ExitStack()
        directory = self._files.enter_context(owned_directory("sglang"))
        try:
            with restored_settings(server_args.log_level):
                publish(server_args, role="encoder")
                # SGLang's layers need a group of processes, if only of this one.
                meeting = (directory / "group").as_uri()
                self._encoder: Any = MMEncoder(server_args, dist_init_method=meeting)
        except BaseException as error:
            self.close()
            raise _problem(error) from error
        self.dtype: torch.dtype = next(self._encoder.model.parameters()).dtype

    def encode(self, batch: Sequence[Patches]) -> "list[Tensor]":
        """Return the rows of each item, [rows, size], in one forward of the tower. All are of one modality."""
        import torch

        modality = batch[0].item.modality
        encode = getattr(self._encoder.model, f"get_{modality}_feature")
        with torch.inference_mode():
            rows = encode([self._data_item(each) for each in batch])
            split: list[Tensor] = list(rows.cpu().split([each.item.rows for each in batch]))
        return split

    def close(self) -> None:
        """Free the tower and leave the group. Idempotent."""
        from sglang.srt.distributed import destroy_distributed_environment, destroy_model_parallel

        self._encoder = None
        with suppress(Exception):  # whatever of it exists
            destroy_model_parallel()
            destroy_distributed_environment()
        self._files.close()

    def _data_item(self, patches: Patches) -> Any:
        import torch
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        item = patches.item
        return MultimodalDataItem(
            modality=Modality.from_str(item.modality),
            feature=patches.pixels.to(self._encoder.device),
            model_specific_data={f"{item.modality}_grid_thw": torch.tensor(item.grid, dtype=torch.int64)},
        )


def _problem(error: BaseException) -> BaseException:
    if isinstance(error, BatonError) or not isinstance(error, Exception):
        return error
    if isinstance(error, ValueError):
        return ConfigError(f"SGLang does not start with these arguments: {error}")
    return EngineDead(f"SGLang's encoder did not start: {error!r}")
