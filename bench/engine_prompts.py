"""The prompts of the engine benchmark: distinct English texts of an exact token count, the same in every run."""

import random
from collections.abc import Callable

Encode = Callable[[str], list[int]]

PLACES = ("harbour", "village", "valley", "library", "market", "island", "castle", "garden", "station", "mountain")
PEOPLE = ("a fisherman", "the teacher", "two sisters", "an old doctor", "the miller", "a young painter", "the mayor")
DEEDS = ("built a bridge", "wrote a long letter", "planted a tree", "sold salt and rope", "lost a map", "told a story")
TIMES = ("in spring", "after the war", "every Sunday", "one cold morning", "before the harvest", "at night")
REASONS = ("because the road was closed", "for the love of music", "to help a friend", "although it rained")


def sentence(choice: random.Random) -> str:
    time, person, deed, place, reason = (choice.choice(phrases) for phrases in (TIMES, PEOPLE, DEEDS, PLACES, REASONS))
    return f"{time[0].upper()}{time[1:]}, {person} {deed} near the {place} {reason}."


def make_prompt(encode: Encode, length: int, seed: int) -> list[int]:
    """`length` tokens of a text that starts with its seed, so that no two prompts share their first block."""
    choice = random.Random(seed)
    text = f"{seed} stories from the {choice.choice(PLACES)}."
    while len(tokens := encode(text)) < length:
        text = " ".join([text, *(sentence(choice) for _ in range(8))])
    return tokens[:length]


def make_prompts(encode: Encode, count: int, length: int, seed: int) -> list[list[int]]:
    return [make_prompt(encode, length, seed + number) for number in range(count)]
