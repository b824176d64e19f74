"""`python -m tools.smoldiff.train --out DIR`: trains smoldiff and measures it on problems it has never had.

On one H200 the default run takes eight minutes. The weights that Baton includes are of two such runs, the second of
which went on (`--start`) with more phrases; their log is `src/baton/models/smoldiff/training.jsonl`.
"""

import argparse
import copy
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tools.smoldiff.chats import Batch, Chat, batches
from tools.smoldiff.decode import Decoding, decode
from tools.smoldiff.directory import MASK, write_directory
from tools.smoldiff.model import Smoldiff, doubled
from tools.smoldiff.muon import Muon
from tools.smoldiff.problems import Problem, held_out_problems, is_right

BLOCK_LENGTHS = {4: 1, 8: 2, 16: 3, 32: 1}
FULL_SHARE = 0.2
WARM_UP = 0.03
KEPT = 0.999
ANSWER_TOKENS = 96
AT_ONCE = 1536
# Tokens of logit zero that the loss counts beside those of the vocabulary: it can be widened by as many rows of zeros.
WIDENED = 2**18


def hide(batch: Batch, block_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens of the answers are hidden, and how much each counts.

    In every block of an answer, a number of tokens drawn from 1 to all is hidden; the fewer, the more each counts, so
    that the loss bounds the likelihood. An answer goes on to the end of its last block: the decoder sees masks there.
    """
    rows, width = batch.ids.shape
    places = torch.arange(width, device=batch.ids.device)
    ends = (batch.ends + block_length - 1) // block_length * block_length
    answers = (places >= batch.starts[:, None]) & (places < ends[:, None])
    blocks = answers.view(rows, -1, block_length)
    counts = blocks.sum(-1, keepdim=True)
    hidden = (torch.rand_like(counts, dtype=torch.float32) * counts).floor() + 1
    hidden = torch.where(torch.rand_like(hidden) < FULL_SHARE, counts, hidden)
    order = torch.rand(blocks.shape, device=places.device).masked_fill(~blocks, 2.0).argsort(-1).argsort(-1)
    masked = blocks & (order < hidden)
    weights = masked * (counts / hidden.clamp(min=1))
    return masked.view(rows, width), weights.view(rows, width)


def loss_of(model: Smoldiff, batch: Batch, block_length: int) -> torch.Tensor:
    """Return the loss of the hidden tokens of a batch."""
    width = batch.ids.shape[1]
    masked, weights = hide(batch, block_length)
    noisy = batch.ids.masked_fill(masked, MASK)
    places = torch.arange(width, device=batch.ids.device).repeat(2)
    hidden = model(torch.cat((batch.ids, noisy), 1), places, doubled(width, block_length, places.device))
    logits = model.logits(hidden[:, width:]).float().flatten(0, 1)
    others = torch.full_like(logits[:, :1], math.log(WIDENED))
    targets = batch.ids.flatten().long()
    losses = functional.cross_entropy(torch.cat((logits, others), 1), targets, reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def rate(progress: float) -> float:
    """Return the share of the learning rate: warm up, then fall along a cosine."""
    if progress < WARM_UP:
        return progress / WARM_UP + 0.01
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the rest, and an average of the weights over the last steps."""

    def __init__(self, model: Smoldiff) -> None:
        named = list(model.named_parameters())
        self._muon = Muon((w for name, w in named if w.ndim == 2 and "embed" not in name), momentum=0.95, decay=0.05)
        rest = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self._adamw = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self._weights: list[torch.Tensor] = [weight for _, weight in named]
        self.average = copy.deepcopy(model).requires_grad_(False)
        self._averaged: list[torch.Tensor] = list(self.average.parameters())
        self._steps = 0

    def step(self, rate: float) -> None:
        """Change the weights by their gradients, and drop the gradients."""
        self._muon.step(rate)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._steps += 1
        kept = min(KEPT, self._steps / (self._steps + 10))
        torch._foreach_lerp_(self._averaged, self._weights, 1 - kept)


def measure(model: Smoldiff, problems: list[Problem], decoding: Decoding) -> dict[str, float]:
    """Return the share of right answers by kind, and forward passes per token (the end token counts)."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    passes = tokens = 0
    for first in range(0, len(problems), AT_ONCE):
        asked = problems[first : first + AT_ONCE]
        prompts = [Chat([], problem).prompt for problem in asked]
        for problem, written in zip(asked, decode(model, prompts, decoding, ANSWER_TOKENS), strict=True):
            text = bytes(token for token in written.tokens if token < 256).decode(errors="replace")
            right[problem.kind].append(written.ended and is_right(problem, text))
            passes += written.passes
            tokens += len(written.tokens) + written.ended
    shares = {kind: round(sum(values) / len(values), 4) for kind, values in right.items()}
    total = round(sum(map(sum, right.values())) / len(problems), 4)
    return {**shares, "all": total, "passes_per_token": round(passes / tokens, 3)}


class Log:
    """Prints and writes what happens, with the seconds since the start."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._start = time.monotonic()

    def note(self, **values: object) -> None:
        """Write a line."""
        line = json.dumps({"seconds": round(time.monotonic() - self._start, 1), **values})
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def train(options: argparse.Namespace) -> None:
    """Train, measure, and write the model directory with the log."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    prepared = batches(options.batch, options.seed)  # its processes are forked before the GPU is in use
    write_directory(options.out)
    log = Log(options.out / "training.jsonl")
    model = Smoldiff().to(device)
    if options.start is not None:
        model.load_tensors(load_file(options.start))
    log.note(parameters=sum(weight.numel() for weight in model.parameters()), batch=options.batch, rate=options.rate)
    trained = learn(model, prepared, options, log)
    trained.to(torch.bfloat16).float()  # what is measured is what is saved
    save_file(trained.tensors(), options.out / "model.safetensors", {"format": "pt"})
    measure_all(trained, options.test_problems, log)


def learn(model: Smoldiff, prepared: Iterator[Batch], options: argparse.Namespace, log: Log) -> Smoldiff:
    """Train `model`; return the average of its last steps."""
    chance = random.Random(options.seed)
    device = model.embed_tokens.weight.device
    optimizer = Optimizer(model)
    for layer in model.layers if device.type == "cuda" else ():
        layer.compile(dynamic=True)
    some = held_out_problems(50)
    step, chats, progress, start = 0, 0, 0.0, time.monotonic()
    while progress < 1:
        batch = Batch(*(tensor.to(device, non_blocking=True) for tensor in next(prepared)))
        block_length = chance.choices(list(BLOCK_LENGTHS), list(BLOCK_LENGTHS.values()))[0]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch, block_length)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(options.rate * rate(progress))
        step, chats = step + 1, chats + len(batch.ids)
        if step % 200 == 0:
            log.note(step=step, chats=chats, loss=round(loss.item(), 4))
        if step % 2000 == 0:
            log.note(step=step, held_out=measure(optimizer.average, some, Decoding()))
        progress = max(step / options.steps, (time.monotonic() - start) / options.seconds)
    log.note(step=step, chats=chats, loss=round(loss.item(), 4))
    return optimizer.average


def measure_all(model: Smoldiff, count: int, log: Log) -> None:
    """Measure with the default decoding, then with others on fewer problems."""
    log.note(final="held_out_problems", **measure(model, held_out_problems(count), Decoding()))
    log.note(final="held_out_words", **measure(model, held_out_problems(count, other_words=True), Decoding()))
    some = held_out_problems(count // 5)
    for size in BLOCK_LENGTHS:
        for threshold in (None, 0.7, 0.9, 0.95):
            result = measure(model, some, Decoding(size, threshold))
            log.note(block_length=size, threshold=threshold, **result)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(prog="python -m tools.smoldiff.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start", type=Path, help="weights of an earlier run to go on from")
    parser.add_argument("--seed", type=int, default=1, help="another seed trains on other problems")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=450.0, help="train for this long at most")
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--test-problems", type=int, default=1000, help="of each kind")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
