"""Problems as chats: tokens with the answer at the end, sometimes after a system message and earlier questions."""

import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tools.smoldiff.directory import ASSISTANT, END, SYSTEM, USER
from tools.smoldiff.problems import Problem, make_problem
from tools.smoldiff.wordings import KINDS

SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You are a calculator.", "Be exact.", "You are smoldiff.")
LONGEST = 384
ROUNDING = 32
SORTED_BATCHES = 16
SHARES = {"other": 0.3, "add": 1.0, "subtract": 1.0, "multiply": 1.5, "ascending": 1.2, "descending": 1.2, "count": 1.2}


class Chat(NamedTuple):
    """A question with its answer, as tokens; `before` are a system message and earlier turns."""

    before: list[int]
    problem: Problem

    @property
    def prompt(self) -> list[int]:
        """The tokens that the chat template renders."""
        return [*self.before, *turn(USER, self.problem.text), ASSISTANT]

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer with its end."""
        return [*self.prompt, *self.problem.answer.encode(), END]


def turn(role: int, text: str) -> list[int]:
    """Return the tokens of a message."""
    return [role, *text.encode(), END]


def make_chat(chance: random.Random) -> Chat:
    """Make up a chat for training: most are one question."""
    before: list[int] = []
    if chance.random() < 0.1:
        before += turn(SYSTEM, chance.choice(SYSTEMS))
    problem = _any_problem(chance)
    for _ in range(chance.choices((0, 1, 2), (16, 3, 1))[0]):
        earlier = _any_problem(chance)
        turns = turn(USER, earlier.text) + turn(ASSISTANT, earlier.answer)
        if len(before) + len(turns) + len(problem.text) + len(problem.answer) + 4 <= LONGEST:
            before += turns
    return Chat(before, problem)


def _any_problem(chance: random.Random) -> Problem:
    kind = chance.choices(KINDS, [SHARES.get(kind, 1.0) for kind in KINDS])[0]
    return make_problem(chance, kind)


class Batch(NamedTuple):
    """Chats as tensors, padded with end tokens; an answer is from its start to its end, the end token included."""

    ids: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


def make_batch(chats: list[Chat]) -> Batch:
    """Return chats as tensors."""
    rows = [chat.tokens for chat in chats]
    width = -(-max(map(len, rows)) // ROUNDING) * ROUNDING
    ids = torch.tensor([row + [END] * (width - len(row)) for row in rows], dtype=torch.int32)
    starts = torch.tensor([len(chat.prompt) for chat in chats], dtype=torch.int32)
    return Batch(ids, starts, torch.tensor([len(row) for row in rows], dtype=torch.int32))


class Chats(torch.utils.data.IterableDataset[Batch]):
    """Batches without end, of chats that are about equally long; every process of the loader makes others."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self._size = size
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        chance = random.Random(1000 * self._seed + (worker.id if worker is not None else 0))
        while True:
            chats = [make_chat(chance) for _ in range(self._size * SORTED_BATCHES)]
            chats.sort(key=lambda chat: len(chat.before) + len(chat.problem.text) + len(chat.problem.answer))
            groups = [chats[first : first + self._size] for first in range(0, len(chats), self._size)]
            chance.shuffle(groups)
            yield from map(make_batch, groups)


def batches(size: int, seed: int) -> Iterator[Batch]:
    """Yield batches that are made ahead, by processes."""
    processes = max(1, (os.cpu_count() or 2) - 2)
    loader = torch.utils.data.DataLoader(Chats(size, seed), batch_size=None, num_workers=processes, prefetch_factor=4)
    return iter(loader)
