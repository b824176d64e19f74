"""Problems in plain English with one right answer each. Those for the test are chosen by hash and never trained on."""

import hashlib
import random
from collections.abc import Callable
from typing import NamedTuple

from tools.smoldiff.wordings import KINDS, phrase
from tools.smoldiff.words import make_word

HELD_OUT_SHARE = 0.1
TEST_SEED = 99
ABILITIES = "I can add, subtract, multiply, sort, spell, reverse and count. Ask me something like that!"


class Problem(NamedTuple):
    """A question with its answer. `key` is the same for problems that teach each other's answer."""

    kind: str
    text: str
    answer: str
    key: str


class Task(NamedTuple):
    """A problem without words: the values that its words name, its answer and its key."""

    values: dict[str, str]
    answer: str
    key: str


def make_problem(chance: random.Random, kind: str, held_out: bool = False, other_words: bool = False) -> Problem:
    """Return a problem of `kind`: one for the test if `held_out`, in words for the test if `other_words`."""
    while True:
        task = _TASKS[kind](chance)
        if is_held_out(task.key) == held_out:
            return Problem(kind, phrase(chance, kind, other_words).format(**task.values), task.answer, task.key)


def held_out_problems(count: int, other_words: bool = False) -> list[Problem]:
    """Return the first `count` problems of each kind with which the model is measured; the kinds alternate."""
    chance = random.Random(TEST_SEED)
    return [make_problem(chance, kind, True, other_words) for _ in range(count) for kind in KINDS]


def is_held_out(key: str) -> bool:
    """Return whether a problem is for the test."""
    return hashlib.blake2b(key.encode(), digest_size=1).digest()[0] < HELD_OUT_SHARE * 256


def is_right(problem: Problem, answer: str) -> bool:
    """Return whether `answer` is exactly the right one."""
    return answer == problem.answer


def _add(chance: random.Random) -> Task:
    a, b = _number(chance), _number(chance)
    return Task({"a": str(a), "b": str(b)}, f"{a} + {b} = {a + b}", f"add {min(a, b)} {max(a, b)}")


def _subtract(chance: random.Random) -> Task:
    a, b = _number(chance), _number(chance)
    if a < b and chance.random() < 0.7:
        a, b = b, a
    return Task({"a": str(a), "b": str(b)}, f"{a} - {b} = {a - b}", f"subtract {min(a, b)} {max(a, b)}")


def _number(chance: random.Random) -> int:
    return chance.randrange(10 ** chance.choice((1, 2, 3, 3)))


def _multiply(chance: random.Random) -> Task:
    a, b = (chance.randrange(10) if chance.random() < 0.15 else chance.randrange(100) for _ in range(2))
    tens, ones = b // 10 * 10, b % 10
    steps = f"{a} x {tens} + {a} x {ones} = {a * tens} + {a * ones} = " if min(a, b) > 10 and ones else ""
    return Task({"a": str(a), "b": str(b)}, f"{a} x {b} = {steps}{a * b}", f"multiply {min(a, b)} {max(a, b)}")


def _ascending(chance: random.Random) -> Task:
    return _sorted_numbers(chance, "ascending")


def _descending(chance: random.Random) -> Task:
    return _sorted_numbers(chance, "descending")


def _sorted_numbers(chance: random.Random, order: str) -> Task:
    digits = chance.choice((1, 2, 3))
    numbers = [
        chance.randrange(10 ** (digits if chance.random() < 0.8 else chance.randrange(1, 4)))
        for _ in range(chance.randrange(2, 9))
    ]
    result = sorted(numbers, reverse=order == "descending")
    items = _separator(chance).join(map(str, numbers))
    return Task({"items": items}, ", ".join(map(str, result)), f"sort {sorted(numbers)}")


def _separator(chance: random.Random) -> str:
    return ", " if chance.random() < 0.75 else " "


def _alphabetical(chance: random.Random) -> Task:
    words = [make_word(chance, 9) for _ in range(chance.randrange(2, 6))]
    items = _separator(chance).join(words)
    return Task({"items": items}, ", ".join(sorted(words)), f"sort {sorted(words)}")


def _word(chance: random.Random) -> str:
    word = make_word(chance)
    return word.capitalize() if chance.random() < 0.1 else word


def _spell(chance: random.Random) -> Task:
    word = _word(chance)
    return Task({"word": word}, "-".join(word), f"spell {word.lower()}")


def _backwards(chance: random.Random) -> Task:
    word = _word(chance)
    return Task({"word": word}, word[::-1], f"backwards {word.lower()}")


def _reverse(chance: random.Random) -> Task:
    if chance.random() < 0.5:
        items = [make_word(chance, 9) for _ in range(chance.randrange(2, 6))]
    else:
        items = [str(_number(chance)) for _ in range(chance.randrange(2, 8))]
    return Task({"items": _separator(chance).join(items)}, ", ".join(items[::-1]), f"reverse {items}")


def _count(chance: random.Random) -> Task:
    word = make_word(chance)
    letter = chance.choice(word) if chance.random() < 0.85 else chance.choice("abcdefghijklmnopqrstuvwxyz")
    if chance.random() < 0.4:  # a word with that letter again
        places = chance.choices(range(len(word)), k=chance.randrange(1, 4))
        word = "".join(letter if place in places else old for place, old in enumerate(word))
    number = word.count(letter)
    answer = f"The letter {letter} occurs {number} {'time' if number == 1 else 'times'} in {word}."
    return Task({"letter": letter, "word": word}, answer, f"count {letter} {word}")


def _length(chance: random.Random) -> Task:
    word = make_word(chance)
    return Task({"word": word}, f"The word {word} has {len(word)} letters.", f"length {word}")


def _other(chance: random.Random) -> Task:
    text = " ".join(make_word(chance, 9) for _ in range(chance.randrange(1, 5)))
    return Task({"text": text}, ABILITIES, f"other {text}")


_TASKS: dict[str, Callable[[random.Random], Task]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "ascending": _ascending,
    "descending": _descending,
    "alphabetical": _alphabetical,
    "spell": _spell,
    "backwards": _backwards,
    "reverse": _reverse,
    "count": _count,
    "length": _length,
    "other": _other,
}
