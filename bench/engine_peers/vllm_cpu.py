"""vLLM's CPU build. Variants: `eager`, or `compiled`, its default (torch.compile, takes minutes to start)."""

import os
import time
from typing import Any

GIB_OF_KV = "1"


class Vllm:
    def __init__(self, setup: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: setup["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = GIB_OF_KV
        # Run the engine in this process: a step then needs no message to another process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        # Keep compiled code here, not in the home directory.
        os.environ["VLLM_CACHE_ROOT"] = setup["cache"]
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(setup["cache"], "inductor")
        # vLLM reads its environment on import.
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self._vllm = vllm
        self._engine = vllm.LLM(
            model=setup["model"],
            dtype="bfloat16",
            max_model_len=setup["context"],
            max_num_seqs=setup["max_batch"],
            max_num_batched_tokens=max(2048, setup["context"]),
            enforce_eager=setup["variant"] == "eager",
            enable_prefix_caching=False,
            seed=0,
        ).llm_engine
        self._requests = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        kind = self._vllm.sampling_params.RequestOutputKind.DELTA
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=kind
        )
        rows: dict[str, dict[str, Any]] = {}
        for prompt in prompts:
            self._requests += 1
            rows[str(self._requests)] = {"times": [], "tokens": []}
            self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.monotonic()
            for output in outputs:
                # Some versions append a suffix to the request id.
                row = rows[output.request_id.partition("-")[0]]
                new = list(output.outputs[0].token_ids)
                row["tokens"] += new
                row["times"] += [now] * len(new)
        return list(rows.values())


def load(setup: dict[str, Any]) -> Vllm:
    return Vllm(setup)
