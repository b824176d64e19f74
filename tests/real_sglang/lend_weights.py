"""Lends one tensor on the GPU over CUDA IPC, in the protocol of checkpoint-engine. Usage: MODEL NAME SOCKET

It prints the name of its GPU, which is the key of the handle, and ends when SGLang has taken the tensor.
"""

import sys
from pathlib import Path

import torch
import zmq
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor


def main(model: Path, name: str, socket: str) -> None:
    tensor = load_file(model / "model.safetensors")[name].to("cuda", torch.bfloat16).contiguous()
    entry = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": 0}
    engine = zmq.Context.instance().socket(zmq.REQ)
    engine.bind(socket)
    print(f"GPU-{torch.cuda.get_device_properties(0).uuid}", flush=True)
    for message in (reduce_tensor(tensor.view(-1).view(torch.uint8)), [entry], None):
        engine.send_pyobj(message)
        engine.recv()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
