"""How much GPU memory processes use, as the driver counts it."""

from collections.abc import Iterable

import psutil
import pynvml

MIB = 1 << 20


def gpu_mib(processes: Iterable[psutil.Process]) -> int:
    """Return the GPU memory of these processes; of the whole GPU where the driver does not count by process."""
    pynvml.nvmlInit()
    try:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        pids = {process.pid for process in processes}
        used = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
        counted = [used[pid] for pid in pids & used.keys()]
        if counted and None not in counted:
            return sum(counted) // MIB
        return int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) // MIB
    finally:
        pynvml.nvmlShutdown()
