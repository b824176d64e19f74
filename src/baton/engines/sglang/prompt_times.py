"""When SGLang has queued and computed a prompt, from the times in its chunks. It sends them with --sglang-metrics."""

from collections.abc import Mapping
from time import perf_counter_ns, time_ns
from typing import Any

from baton.protocol.outputs import PromptProgress

NS_PER_S = 1_000_000_000


def prompt_progress(meta: Mapping[str, Any], prompt_tokens: int) -> tuple[PromptProgress, ...]:
    """Return what `meta_info` of the first tokens tells about the prompt; nothing without times."""
    began_s = meta.get("forward_entry_time")
    if not began_s:
        return ()
    offset_ns = perf_counter_ns() - time_ns()
    began_ns = int(began_s * NS_PER_S) + offset_ns
    waited_ns = int(max(0.0, meta.get("queue_time") or 0.0) * NS_PER_S)
    progress = [PromptProgress(began_ns - waited_ns, "queued"), PromptProgress(began_ns, "first_step")]
    if done_s := meta.get("prefill_finished_time"):
        tokens = max(0, prompt_tokens - (meta.get("cached_tokens") or 0))
        progress.append(PromptProgress(int(done_s * NS_PER_S) + offset_ns, "prefill_chunk", tokens))
    return tuple(progress)
