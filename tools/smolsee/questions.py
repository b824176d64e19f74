"""Questions about a picture, their answers, and whether an answer is right."""

import random
import re
from typing import NamedTuple

from tools.smolsee.pictures import COLOURS, SHAPES, Scene, Thing

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
PLURALS = {shape: f"{shape}es" if shape == "cross" else f"{shape}s" for shape in SHAPES}
TASKS = ("describe", "colour", "shape", "count", "digit", "place", "side", "yes")

# The last of each list is kept for the test: the model never sees it in training.
_PHRASES = {
    "describe": (
        "What is in this picture?",
        "What do you see?",
        "Describe the image.",
        "Describe this picture in a few words.",
        "What does the image show?",
        "Tell me what is in the picture.",
        "What can be seen here?",
        "Look at the picture. What is there?",
        "Please tell me what this image contains.",
    ),
    "colour": (
        "What colour is the {shape}?",
        "What color is the {shape}?",
        "Which colour does the {shape} have?",
        "Name the color of the {shape}.",
        "The {shape} in the picture: what color is it?",
        "Tell me the colour of the {shape}.",
        "In which colour is the {shape} drawn?",
    ),
    "shape": (
        "What shape is it?",
        "Which shape is in the picture?",
        "What shape do you see?",
        "Name the shape.",
        "What is the shape in this image?",
        "Tell me which shape this picture shows.",
    ),
    "count": (
        "How many {shapes} are there?",
        "How many {shapes} do you see?",
        "Count the {shapes}.",
        "How many {shapes} are in the picture?",
        "What is the number of {shapes}?",
        "Tell me how many {shapes} the image has.",
        "Please count all {shapes} in this image.",
    ),
    "digit": (
        "Which digit is shown?",
        "What digit is this?",
        "What number do you see?",
        "Which number is in the picture?",
        "Read the digit.",
        "Tell me the number in the image.",
        "What number does this picture show?",
    ),
    "place": (
        "Where is the {shape}?",
        "In which part of the picture is the {shape}?",
        "Where in the image do you see the {shape}?",
        "Tell me where the {shape} is.",
        "At which place in the picture can the {shape} be found?",
    ),
    "side": (
        "Is the {shape} left or right of the {other}?",
        "On which side of the {other} is the {shape}, left or right?",
        "Left or right: where is the {shape}, seen from the {other}?",
        "Tell me whether the {shape} is to the left or to the right of the {other}.",
    ),
    "yes": (
        "Is there a {shape}?",
        "Do you see a {shape}?",
        "Is there a {shape} in the picture?",
        "Does the image show a {shape}?",
        "Can you find a {shape} here?",
    ),
}


class Question(NamedTuple):
    """One question about a scene. `expected` are the words that a right answer has, in this order."""

    task: str
    text: str
    answer: str
    expected: tuple[str, ...]


def ask(scene: Scene, chance: random.Random, held_out: bool = False) -> Question:
    """Make up a question about `scene`; with `held_out`, in words that training never uses."""
    task = chance.choice(_tasks(scene))
    phrases = _PHRASES[task]
    phrase = phrases[-1] if held_out else chance.choice(phrases[:-1])
    return _ASK[task](scene, phrase, chance)


def is_right(question: Question, answer: str) -> bool:
    """Whether `answer` says what the picture shows, and nothing else of the same kind."""
    words = re.findall(r"[a-z]+|\d", answer.lower())
    known = [_KEYWORDS[word] for word in words if word in _KEYWORDS]
    return tuple(known) == question.expected


def _tasks(scene: Scene) -> tuple[str, ...]:
    return {
        "single": ("describe", "colour", "shape", "place", "yes", "count"),
        "pair": ("describe", "colour", "side", "yes", "place"),
        "many": ("describe", "count", "count", "colour", "shape"),
        "digit": ("describe", "digit", "digit"),
    }[scene.kind]


def _describe(scene: Scene, phrase: str, chance: random.Random) -> Question:
    first = scene.things[0]
    if scene.kind == "digit":
        return Question("describe", phrase, f"The digit {first.kind} in {first.colour}.", (first.kind, first.colour))
    if scene.kind == "single":
        return Question("describe", phrase, f"{_article(first.colour)} {first.kind}.", (first.colour, first.kind))
    if scene.kind == "pair":
        left, right = sorted(scene.things, key=lambda thing: thing.x)
        answer = f"{_article(left.colour)} {left.kind} and {_article(right.colour).lower()} {right.kind}."
        return Question("describe", phrase, answer, (left.colour, left.kind, right.colour, right.kind))
    count = NUMBERS[len(scene.things)]
    answer = f"{count.capitalize()} {first.colour} {PLURALS[first.kind]}."
    return Question("describe", phrase, answer, (count, first.colour, first.kind))


def _colour(scene: Scene, phrase: str, chance: random.Random) -> Question:
    thing = chance.choice(scene.things)
    text = phrase.format(shape=thing.kind)
    if scene.kind == "many":
        text = text.replace(f"{thing.kind} is it", f"{PLURALS[thing.kind]} are they")
        text = text.replace(f"is the {thing.kind}", f"are the {PLURALS[thing.kind]}")
        text = text.replace(thing.kind + " have", PLURALS[thing.kind] + " have").replace("does the", "do the")
    return Question("colour", text, f"{thing.colour.capitalize()}.", (thing.colour,))


def _shape(scene: Scene, phrase: str, chance: random.Random) -> Question:
    kind = scene.things[0].kind
    return Question("shape", phrase, f"A {kind}.", (kind,))


def _count(scene: Scene, phrase: str, chance: random.Random) -> Question:
    text = phrase.format(shapes=PLURALS[scene.things[0].kind])
    count = NUMBERS[len(scene.things)]
    return Question("count", text, f"{count.capitalize()}.", (count,))


def _digit(scene: Scene, phrase: str, chance: random.Random) -> Question:
    digit = scene.things[0].kind
    return Question("digit", phrase, f"{digit}.", (digit,))


def _place(scene: Scene, phrase: str, chance: random.Random) -> Question:
    clear = [thing for thing in scene.things if _is_clear(thing.x) and _is_clear(thing.y)]
    if not clear:
        return _colour(scene, _PHRASES["colour"][0], chance)
    thing = chance.choice(clear)
    row, column = ("top", "middle", "bottom")[_third(thing.y)], ("left", "centre", "right")[_third(thing.x)]
    expected: tuple[str, ...]
    if (row, column) == ("middle", "centre"):
        answer, expected = "In the centre.", ("centre",)
    elif row == "middle":
        answer, expected = f"On the {column}.", (column,)
    elif column == "centre":
        answer, expected = f"At the {row}.", (row,)
    else:
        answer, expected = f"At the {row} {column}.", (row, column)
    return Question("place", phrase.format(shape=thing.kind), answer, expected)


def _side(scene: Scene, phrase: str, chance: random.Random) -> Question:
    thing, other = chance.sample(scene.things, 2)
    if abs(thing.x - other.x) < 0.15:
        return _colour(scene, _PHRASES["colour"][0], chance)
    side = "left" if thing.x < other.x else "right"
    return Question("side", phrase.format(shape=thing.kind, other=other.kind), f"{side.capitalize()}.", (side,))


def _yes(scene: Scene, phrase: str, chance: random.Random) -> Question:
    present = {thing.kind for thing in scene.things}
    if chance.random() < 0.5:
        return Question("yes", phrase.format(shape=chance.choice(sorted(present))), "Yes.", ("yes",))
    absent = chance.choice([shape for shape in SHAPES if shape not in present])
    return Question("yes", phrase.format(shape=absent), "No.", ("no",))


def _is_clear(share: float) -> bool:
    """Whether a place is not at the border of two thirds."""
    return all(abs(share - border) > 0.04 for border in (1 / 3, 2 / 3))


def _third(share: float) -> int:
    return min(2, int(3 * share))


def _article(colour: str) -> str:
    return f"An {colour}" if colour[0] in "aeiou" else f"A {colour}"


def _keywords() -> dict[str, str]:
    words = {word: word for word in (*COLOURS, *SHAPES, *NUMBERS, *map(str, range(10)))}
    words |= {plural: shape for shape, plural in PLURALS.items()}
    words |= {word: word for word in ("left", "right", "top", "bottom", "yes", "no")}
    return words | {"centre": "centre", "center": "centre"}


_KEYWORDS = _keywords()
_ASK = {
    "describe": _describe,
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "digit": _digit,
    "place": _place,
    "side": _side,
    "yes": _yes,
}
__all__ = ["TASKS", "Question", "Thing", "ask", "is_right"]
