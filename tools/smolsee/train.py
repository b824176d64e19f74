"""`python -m tools.smolsee.train --base DIR --out DIR`: trains smolsee and measures it on pictures it has not seen.

On one H200 the default run takes eight minutes. On a CPU, use fewer and smaller steps (`--steps 200 --batch 16`).
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from tools.smolsee.model import IMAGE_SIZE, PICTURE, Smolsee, load_tokenizer
from tools.smolsee.pictures import COLOURS, SHAPES, Scene, draw, make_scene
from tools.smolsee.questions import TASKS, Question, ask, is_right

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OTHER_SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You describe pictures.", "Be concise and exact.")
ANSWER_TOKENS = 16
FIRST_TEST_PICTURE = 1 << 30
TEST_SEED = 99
KINDS = (*SHAPES, *map(str, range(10)))
HINT_WEIGHT = 0.1
WARM_UP = 0.05
CHAT_INTERVAL = 4
CHAT_TOKENS = 48
CHATS = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a computer is.",
    "What is 12 plus 30?",
    "Tell me a joke.",
    "How do I cook rice?",
    "Name three animals.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is the difference between a cat and a dog?",
    "Write a Python function that adds two numbers.",
    "Translate 'good morning' into French.",
    "What should I wear when it rains?",
    "List the planets of the solar system.",
    "How many days has a week?",
    "Describe your favourite place.",
    "What colour is grass?",
    "Write an email to a friend.",
    "Summarise the story of Cinderella.",
    "What is a square?",
    "Give me advice for learning a language.",
    "How does a bicycle work?",
)


class Sample(NamedTuple):
    """A question about one picture or two, with their numbers; `parts` are its text and its pictures in order."""

    pictures: tuple[int, ...]
    parts: tuple[str, ...]
    system: str
    question: Question

    @property
    def prompt(self) -> str:
        """The prompt as the chat template renders it, with pictures expanded."""
        before = f"<|im_start|>system\n{self.system}<|im_end|>\n" if self.system else ""
        return f"{before}<|im_start|>user\n{''.join(self.parts)}<|im_end|>\n<|im_start|>assistant\n"


def picture(seed: int) -> tuple[Scene, Image.Image]:
    """Draw the picture number `seed`, at a size of its own, as a client would send it."""
    chance = random.Random(seed)
    scene = make_scene(chance)
    return scene, draw(scene, chance, chance.randrange(IMAGE_SIZE, 3 * IMAGE_SIZE))


def render(seed: int) -> tuple[Scene, np.ndarray[Any, Any]]:
    """Draw the picture number `seed`, as the model gets it."""
    scene, image = picture(seed)
    resized = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
    return scene, np.asarray(resized).transpose(2, 0, 1)


def render_all(first: int, count: int) -> tuple[list[Scene], torch.Tensor]:
    """Draw `count` pictures on all cores."""
    with multiprocessing.get_context("fork").Pool() as pool:
        drawn = pool.map(render, range(first, first + count), chunksize=256)
    return [scene for scene, _ in drawn], torch.from_numpy(np.stack([pixels for _, pixels in drawn]))


class Form(NamedTuple):
    """How a prompt is built; all prompts of a batch have the same form, so that little is padding."""

    pictures: int = 1
    system: str = ""


def make_form(chance: random.Random) -> Form:
    """Make up a form: most prompts have one picture and no system message."""
    system = chance.choices(("", SYSTEM, chance.choice(OTHER_SYSTEMS)), (7, 1, 2))[0]
    return Form(2 if chance.random() < 0.12 else 1, system)


def make_sample(scenes: list[Scene], chance: random.Random, form: Form, held_out: bool = False) -> Sample:
    """Make up a question about one picture, which another may be beside."""
    chosen = chance.randrange(len(scenes))
    question = ask(scenes[chosen], chance, held_out)
    pictures: tuple[int, ...] = (chosen,)
    text = question.text
    if form.pictures == 2:
        other = chance.randrange(len(scenes))
        place = chance.randrange(2)
        pictures = (chosen, other) if place == 0 else (other, chosen)
        text = f"In the {('first', 'second')[place]} picture: {text[0].lower()}{text[1:]}"
    shown = (PICTURE,) * len(pictures)
    parts = (*shown, text) if chance.random() < 0.85 else (text, *shown)
    return Sample(pictures, parts, form.system, question)


class Batch(NamedTuple):
    """Samples as tensors; `targets` are -100 where nothing is to be learned."""

    pictures: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor


def make_batch(tokenizer: Any, samples: list[Sample]) -> Batch:
    """Tokenize prompts with their answers, padded on the right."""
    prompts = tokenizer([sample.prompt for sample in samples], add_special_tokens=False)["input_ids"]
    answers = tokenizer([f"{sample.question.answer}<|im_end|>" for sample in samples], add_special_tokens=False)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers["input_ids"], strict=True)]
    width = -(-max(map(len, rows)) // 8) * 8
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), -100, dtype=torch.long)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
        targets[number, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    return Batch(torch.tensor([number for sample in samples for number in sample.pictures]), ids, mask, targets)


class Samples(torch.utils.data.IterableDataset[Batch]):
    """Batches without end; every process of the loader makes others."""

    def __init__(self, tokenizer: Any, scenes: list[Scene], size: int, seed: int) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._scenes = scenes
        self._size = size
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        chance = random.Random(1000 * self._seed + (worker.id if worker is not None else 0))
        while True:
            form = make_form(chance)
            yield make_batch(self._tokenizer, [make_sample(self._scenes, chance, form) for _ in range(self._size)])


def batches(tokenizer: Any, scenes: list[Scene], size: int, seed: int) -> Iterator[Batch]:
    """Yield batches that are made ahead, by processes."""
    processes = max(1, (os.cpu_count() or 2) - 4)
    samples = Samples(tokenizer, scenes, size, seed)
    return iter(torch.utils.data.DataLoader(samples, batch_size=None, num_workers=processes, prefetch_factor=4))


class Chats:
    """Chats without a picture, answered by the language model alone: the adapters must not change these answers."""

    def __init__(self, model: Smolsee, tokenizer: Any) -> None:
        device = model.new_rows.device
        prompts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in CHATS]
        rows = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        width = max(map(len, rows)) + CHAT_TOKENS
        self._ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        self._mask = torch.zeros_like(self._ids)
        ends = torch.tensor([len(row) for row in rows], device=device)
        for number, row in enumerate(rows):
            self._ids[number, : len(row)] = torch.tensor(row)
            self._mask[number, : len(row)] = 1
        nothing = torch.zeros(0, 1, model.new_rows.shape[1], device=device)
        numbers = torch.arange(len(rows), device=device)
        model.switch.on = False
        with torch.no_grad():
            for _ in range(CHAT_TOKENS):
                hidden = model.read(self._ids, self._mask, nothing)
                self._ids[numbers, ends] = model.logits(hidden[numbers, ends - 1]).argmax(-1)
                self._mask[numbers, ends] = 1
                ends += 1
            self._known = model.logits(model.read(self._ids, self._mask, nothing)).float().log_softmax(-1)
        model.switch.on = True
        self._nothing = nothing

    def loss(self, model: Smolsee) -> torch.Tensor:
        """Return how far the answers are from those of the language model alone."""
        now = model.logits(model.read(self._ids, self._mask, self._nothing)).float().log_softmax(-1)
        apart = torch.nn.functional.kl_div(now, self._known, log_target=True, reduction="none").sum(-1)
        return (apart * self._mask).sum() / self._mask.sum()


class Hints(torch.nn.Module):
    """What is in a picture, read straight from its embeddings: speeds the tower's learning, and is thrown away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._heads = torch.nn.Linear(width, len(COLOURS) + len(KINDS) + 7)

    def loss(self, seen: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """Return the loss for `facts`: colour, kind and count of the first thing of each picture."""
        outputs = self._heads(seen.float().mean(1)).split((len(COLOURS), len(KINDS), 7), dim=1)
        losses = [torch.nn.functional.cross_entropy(output, facts[:, number]) for number, output in enumerate(outputs)]
        return torch.stack(losses).sum()


def facts_of(scenes: list[Scene]) -> torch.Tensor:
    """Return colour, kind and count of every scene, as numbers."""
    colours, kinds = list(COLOURS), list(KINDS)
    rows = [
        (colours.index(scene.things[0].colour), kinds.index(scene.things[0].kind), len(scene.things))
        for scene in scenes
    ]
    return torch.tensor(rows)


def rate(progress: float, peak: float) -> float:
    """Return the learning rate: warm up, then fall along a cosine."""
    if progress < WARM_UP:
        return peak * (progress / WARM_UP + 0.01)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))))


@torch.no_grad()
def answer(model: Smolsee, tokenizer: Any, pixels: torch.Tensor, samples: list[Sample]) -> list[str]:
    """Answer every sample, greedily."""
    device = model.new_rows.device
    prompts = tokenizer([sample.prompt for sample in samples], add_special_tokens=False)["input_ids"]
    numbers = torch.tensor([number for sample in samples for number in sample.pictures])
    seen = model.see(pixels[numbers].to(device))
    width = max(map(len, prompts)) + ANSWER_TOKENS
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        ids[number, : len(prompt)] = torch.tensor(prompt)
        mask[number, : len(prompt)] = 1
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(ANSWER_TOKENS):
        hidden = model.read(ids, mask, seen)
        ids[rows, ends] = model.logits(hidden[rows, ends - 1]).argmax(-1)
        mask[rows, ends] = 1
        ends += 1
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = []
    for number, prompt in enumerate(prompts):
        made = ids[number, len(prompt) : len(prompt) + ANSWER_TOKENS].tolist()
        texts.append(tokenizer.decode(made[: made.index(stop)] if stop in made else made))
    return texts


def measure(
    model: Smolsee, tokenizer: Any, scenes: list[Scene], pixels: torch.Tensor, count: int, held_out: bool
) -> dict[str, float]:
    """Return the share of right answers by task, over `count` questions in the words of training, or in others."""
    chance = random.Random(TEST_SEED)
    right: dict[str, list[bool]] = {task: [] for task in TASKS}
    for first in range(0, count, 250):
        samples = [make_sample(scenes, chance, Form(), held_out) for _ in range(min(250, count - first))]
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.device.type == "cuda"):
            texts = answer(model, tokenizer, pixels, samples)
        for sample, text in zip(samples, texts, strict=True):
            right[sample.question.task].append(is_right(sample.question, text))
    shares = {task: round(sum(values) / len(values), 4) for task, values in right.items() if values}
    return {**shares, "all": round(sum(map(sum, right.values())) / count, 4)}


def train(options: argparse.Namespace) -> None:
    """Train, measure, and write weights and log."""
    began = time.monotonic()
    torch.manual_seed(options.seed)
    device = options.device
    tokenizer = load_tokenizer(options.base)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    scenes, pixels = render_all(options.seed * options.pictures, options.pictures)
    prepared = batches(tokenizer, scenes, options.batch, options.seed)
    test_scenes, test_pixels = render_all(FIRST_TEST_PICTURE, options.test_pictures)
    pixels, test_pixels, facts = pixels.to(device), test_pixels.to(device), facts_of(scenes).to(device)
    model = Smolsee(options.base, device)
    if options.start is not None:
        model.load_learned(options.start)
    hints = Hints(model.language.config.hidden_size).to(device)
    learned = [*model.learning(), *hints.parameters()]
    chats = Chats(model, tokenizer)
    optimizer = torch.optim.AdamW(learned, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.02)
    with (options.out / "smolsee-training.jsonl").open("w") as log:

        def note(**values: object) -> None:
            line = json.dumps({"seconds": round(time.monotonic() - began, 1), **values})
            print(line, flush=True)
            log.write(line + "\n")

        note(pictures=options.pictures, batch=options.batch, steps=options.steps)
        step, progress, start = 0, 0.0, time.monotonic()
        while progress < 1:
            for group in optimizer.param_groups:
                group["lr"] = rate(progress, options.rate)
            extra = chats if step % CHAT_INTERVAL == 0 else None
            loss, hint, norm = _learn(model, hints, optimizer, next(prepared), pixels, facts, learned, extra)
            if step % 100 == 0:
                note(step=step, loss=round(loss.item(), 4), hint=round(hint.item(), 4), norm=round(norm.item(), 3))
            if step % 1000 == 999:
                note(step=step, seen_words=measure(model, tokenizer, test_scenes, test_pixels, 1000, False))
            step += 1
            progress = max(step / options.steps, (time.monotonic() - start) / options.seconds)
        model.round_weights()
        for name, held_out in (("seen_words", False), ("held_out_words", True)):
            note(final=name, **measure(model, tokenizer, test_scenes, test_pixels, options.test_questions, held_out))
    save_file(model.learned(), options.out / "smolsee.safetensors")


def _learn(
    model: Smolsee,
    hints: Hints,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    pixels: torch.Tensor,
    facts: torch.Tensor,
    learned: list[torch.nn.Parameter],
    chats: Chats | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = pixels.device
    numbers, ids = batch.pictures.to(device), batch.ids.to(device)
    targets = batch.targets.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        seen = model.see(pixels[numbers])
        hidden = model.read(ids, batch.mask.to(device), seen)
        asked = targets != -100
        loss = torch.nn.functional.cross_entropy(model.logits(hidden[asked]).float(), targets[asked])
        kept = torch.zeros((), device=device) if chats is None else chats.loss(model)
    hint = hints.loss(seen, facts[numbers])
    optimizer.zero_grad(set_to_none=True)
    (loss + HINT_WEIGHT * hint + kept).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(learned, 1.0)
    if math.isfinite(norm.item()):
        optimizer.step()
    return loss.detach(), hint.detach(), norm.detach()


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(prog="python -m tools.smolsee.train", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct, a model directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start", type=Path, help="weights of an earlier run to go on from")
    parser.add_argument("--seed", type=int, default=1, help="another seed trains on other pictures")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--pictures", type=int, default=150_000)
    parser.add_argument("--test-pictures", type=int, default=8000)
    parser.add_argument("--test-questions", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=1e9, help="train for this long at most")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
