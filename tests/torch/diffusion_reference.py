"""Block diffusion decoding in the most obvious way: every pass computes everything again, for one request alone."""

from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from baton.engines.torch.sampling.draws import uniform
from baton.protocol.requests import Remasking
from tests.doubles.tiny_models import MASK


class Asked(NamedTuple):
    """A request, with every option set."""

    prompt: tuple[int, ...]
    tokens: int = 24
    block: int = 4
    remasking: Remasking = Remasking.DYNAMIC
    steps: int | None = None
    threshold: float = 0.9
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    stops: tuple[int, ...] = ()
    min_tokens: int = 0


class Answer(NamedTuple):
    """The tokens of each block, their log-probabilities in the pass that decided them, and the number of passes."""

    blocks: list[list[int]]
    logprobs: list[float]
    passes: int

    @property
    def tokens(self) -> list[int]:
        return [token for block in self.blocks for token in block]


class Reference:
    """transformers' plain model with a block-causal mask."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "plain", dtype=torch.float32, attn_implementation="eager"
        )
        self._answers: dict[Asked, Answer] = {}

    def answer(self, asked: Asked) -> Answer:
        """Return the answer to `asked`, computed once."""
        if asked not in self._answers:
            self._answers[asked] = self._decode(asked)
        return self._answers[asked]

    def _decode(self, asked: Asked) -> Answer:
        tokens = list(asked.prompt)
        blocks: list[list[int]] = []
        logprobs: list[float] = []
        passes = 0
        while True:
            end = (len(tokens) // asked.block + 1) * asked.block
            found: dict[int, tuple[int, float]] = {}
            masks = end - len(tokens)
            steps = min(asked.steps or asked.block, masks)
            block: list[int] | None = None
            number = 0
            while block is None:
                candidates = self._candidates(asked, tokens, found, end, number)
                quota = masks // steps + (number < masks % steps)
                for position in _selected(asked, candidates, quota):
                    found[position] = candidates[position]
                number += 1
                block = _complete(asked, found, len(tokens), end)
            passes += number
            logprobs += [found[len(tokens) + offset][1] for offset in range(len(block))]
            tokens += block
            blocks.append(block)
            generated = len(tokens) - len(asked.prompt)
            if generated == asked.tokens or _stops(asked, block[-1], generated):
                return Answer(blocks, logprobs, passes)

    def _candidates(
        self, asked: Asked, tokens: list[int], found: dict[int, tuple[int, float]], end: int, number: int
    ) -> dict[int, tuple[int, float]]:
        """Return a token and its log-probability for each masked position."""
        row = tokens + [found[p][0] if p in found else MASK for p in range(len(tokens), end)]
        logits = self.logits(row, asked.block)
        logits[:, MASK] = -torch.inf
        candidates: dict[int, tuple[int, float]] = {}
        for position in range(len(tokens), end):
            if position not in found:
                generated = position - len(asked.prompt)
                token = _sampled(asked, logits[position].clone(), generated, number)
                candidates[position] = (token, float(torch.log_softmax(logits[position], 0)[token]))
        return candidates

    def logits(self, tokens: list[int], block: int) -> torch.Tensor:
        """Return the logits at each position, where a token sees all tokens up to the end of its block."""
        positions = torch.arange(len(tokens))
        seen = positions < ((positions // block + 1) * block).unsqueeze(1)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
        return logits.float()


def _sampled(asked: Asked, logits: torch.Tensor, generated: int, number: int) -> int:
    if generated < asked.min_tokens:
        logits[list(asked.stops)] = -torch.inf
    if asked.temperature == 0.0:
        return int(logits.argmax())
    weights = torch.exp((logits - logits.max()) / asked.temperature).double()
    allowed = weights >= asked.min_p
    order = weights.argsort(descending=True)
    if asked.top_k:
        allowed[order[asked.top_k :]] = False
        weights[order[asked.top_k :]] = 0.0
    if asked.top_p < 1.0:
        cumulated = weights[order].cumsum(0)
        crossing = int((cumulated < asked.top_p * cumulated[-1]).sum())
        allowed[order[crossing + 1 :]] = False
    edges = (weights * allowed).cumsum(0)
    target = uniform(asked.seed, asked.choice, generated * 2**20 + number) * edges[-1]
    return int(torch.searchsorted(edges, target, right=True))


def _selected(asked: Asked, candidates: dict[int, tuple[int, float]], quota: int) -> list[int]:
    """Return the positions to decide: the most confident ones."""
    order = sorted(candidates, key=lambda position: (-candidates[position][1], position))
    sure = [position for position in order if torch.tensor(candidates[position][1]).exp() > asked.threshold]
    return sure if asked.remasking is Remasking.DYNAMIC and len(sure) > quota else order[:quota]


def _complete(asked: Asked, found: dict[int, tuple[int, float]], start: int, end: int) -> list[int] | None:
    """Return the tokens of a block up to the one that ends the output; None while one of them is a mask."""
    block: list[int] = []
    for position in range(start, end):
        if position not in found:
            return None
        block.append(found[position][0])
        generated = position + 1 - len(asked.prompt)
        if generated == asked.tokens or _stops(asked, block[-1], generated):
            break
    return block


def _stops(asked: Asked, token: int, generated: int) -> bool:
    return token in asked.stops and generated >= asked.min_tokens
