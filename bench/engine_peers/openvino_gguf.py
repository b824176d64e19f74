"""OpenVINO GenAI's continuous batching over a GGUF file. Variant: which file, by its format."""

import time
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found, unused-ignore]
import openvino_genai  # type: ignore[import-not-found, unused-ignore]

BLOCK = 32


class Pipeline:
    def __init__(self, setup: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = setup["kv_tokens"] // BLOCK + setup["max_batch"]
        scheduler.max_num_seqs = setup["max_batch"]
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": setup["threads"], "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setup["gguf"], scheduler, "CPU", properties)
        self._requests = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [self._add(prompt, config) for prompt in prompts]
        rows: list[dict[str, Any]] = [{"times": [], "tokens": []} for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic()
            for handle, row in zip(handles, rows, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        row["tokens"] += output.generated_ids
                        row["times"] += [now] * len(output.generated_ids)
        return rows

    def _add(self, prompt: list[int], config: Any) -> Any:
        self._requests += 1
        return self._pipeline.add_request(self._requests, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)


def load(setup: dict[str, Any]) -> Pipeline:
    return Pipeline(setup)
