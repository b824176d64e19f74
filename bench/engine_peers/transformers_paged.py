"""Continuous batching of transformers: paged KV, requests join and leave. Variant: the dtype of the weights."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE = 256
NO_EOS = -1
RESULT_TIMEOUT_S = 300


class Paged:
    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup["model"], dtype=getattr(torch, setup["variant"]), attn_implementation="sdpa", local_files_only=True
        )
        # Rows share no page, so the last one of each row is partly empty.
        pages = setup["kv_tokens"] // PAGE + setup["max_batch"]
        make_config: Any = GenerationConfig
        self._manager = model.init_continuous_batching(
            generation_config=make_config(do_sample=False, eos_token_id=NO_EOS, max_new_tokens=setup["context"]),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=pages, max_batch_tokens=1024, allow_block_sharing=False
            ),
        )
        self._manager.start()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        ids = self._manager.add_requests(prompts, max_new_tokens=new_tokens, streaming=True)
        rows: dict[str, dict[str, Any]] = {name: {"times": [], "tokens": []} for name in ids}
        unfinished = len(ids)
        while unfinished:
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None or result.error:
                raise RuntimeError(f"no result: {result and result.error}")
            row = rows[result.request_id]
            row["tokens"] = list(result.generated_tokens)
            row["times"] += [time.monotonic()] * (len(row["tokens"]) - len(row["times"]))
            unfinished -= result.is_finished()
        return [rows[name] for name in ids]


def load(setup: dict[str, Any]) -> Paged:
    return Paged(setup)
