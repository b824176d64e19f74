"""llama.cpp through xllamacpp: its server's slots in this process. Variant: which GGUF file, by its format."""

import threading
import time
from typing import Any

import xllamacpp  # type: ignore[import-not-found, unused-ignore]


class Slots:
    def __init__(self, setup: dict[str, Any]) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = setup["gguf"]
        params.n_ctx = setup["kv_tokens"]
        params.n_parallel = setup["max_batch"]
        # One KV pool for all slots: split between the slots, it would not hold a long prompt.
        params.kv_unified = True
        params.cache_ram_mib = 0
        params.cpuparams.n_threads = setup["threads"]
        params.cpuparams_batch.n_threads = setup["threads"]
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{"times": [], "text": "", "errors": []} for _ in prompts]
        threads = [
            threading.Thread(target=self._complete, args=(prompt, new_tokens, row))
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors := [error for row in rows for error in row["errors"]]:
            raise RuntimeError(errors[0])
        return rows

    def _complete(self, prompt: list[int], new_tokens: int, row: dict[str, Any]) -> None:
        def on_event(event: dict[str, Any]) -> None:
            now = time.monotonic()
            if "choices" not in event:
                row["errors"].append(str(event))
            elif "usage" not in event:
                row["times"].append(now)
                row["text"] += event["choices"][0]["text"]
            else:
                # A character of several tokens arrives as one event.
                missing = event["usage"]["completion_tokens"] - len(row["times"])
                row["times"] += [row["times"][-1]] * missing

        request = {
            "prompt": prompt,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        try:
            self._server.handle_completions(request, on_event)
        except Exception as error:  # noqa: BLE001 - raised by the thread that joins this one
            row["errors"].append(repr(error))


def load(setup: dict[str, Any]) -> Slots:
    return Slots(setup)
