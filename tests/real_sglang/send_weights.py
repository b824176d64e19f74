"""Rank 0 of a group: broadcasts one tensor of each model that it is given. Usage: BACKEND PORT NAME MODEL..."""

import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from safetensors.torch import load_file


def main() -> None:
    backend, port, name, *models = sys.argv[1:]
    from sglang.srt.utils import init_custom_process_group

    group = init_custom_process_group(
        backend=backend,
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name="trainer",
        timeout=timedelta(seconds=60),
    )
    for model in models:
        tensor = load_file(f"{model}/model.safetensors")[name]
        # Of two GPUs the engine has the first.
        dist.broadcast(tensor.to("cuda:1") if backend == "nccl" else tensor, src=0, group=group)
    signal.pause()


if __name__ == "__main__":
    main()
