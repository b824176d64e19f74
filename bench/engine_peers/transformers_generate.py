"""`generate` of transformers: one padded batch from start to end. Variant: the dtype of the weights."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PAD = 0


class Clock:
    """A stopping criterion, called after every token. It records the time and never stops the generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Generate:
    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup["model"], dtype=getattr(torch, setup["variant"]), local_files_only=True
        )
        self._model = model.eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        width = max(map(len, prompts))
        padded = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = Clock()
        output = self._model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=None,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=None,
            eos_token_id=None,
            pad_token_id=PAD,
            stopping_criteria=[clock],
        )
        return [{"times": clock.times, "tokens": row} for row in output[:, width:].tolist()]


def load(setup: dict[str, Any]) -> Generate:
    return Generate(setup)
