"""Use counts for expert plans: a row per layer, skewed in different ways, the same in every run."""

import random
from collections.abc import Callable

Counts = list[list[float]]

LAYERS = 61
EXPERTS = 256
HOT = 6


def zipf(choice: random.Random) -> list[float]:
    """The expert of rank r is used 1/r times as often as the first."""
    row = [1e6 / rank for rank in range(1, EXPERTS + 1)]
    choice.shuffle(row)
    return row


def few_hot(choice: random.Random) -> list[float]:
    """A few experts take most of the load."""
    row = [choice.uniform(50, 150) for _ in range(EXPERTS)]
    for expert in choice.sample(range(EXPERTS), HOT):
        row[expert] = choice.uniform(5_000, 20_000)
    return row


def uniform(choice: random.Random) -> list[float]:
    return [choice.uniform(900, 1100) for _ in range(EXPERTS)]


def sparse(choice: random.Random) -> list[float]:
    """Most experts are not used."""
    return [choice.uniform(1, 10_000) if choice.random() < 0.3 else 0.0 for _ in range(EXPERTS)]


def one_hot(choice: random.Random) -> list[float]:
    """One expert takes nearly all the load."""
    row = [choice.uniform(0, 10) for _ in range(EXPERTS)]
    row[choice.randrange(EXPERTS)] = 1e6
    return row


def correlated(choice: random.Random) -> Callable[[random.Random], list[float]]:
    """Layers resemble each other: the same experts are popular in all of them, to a different degree."""
    popularity = [choice.lognormvariate(0, 1) for _ in range(EXPERTS)]
    return lambda choice: [1000 * value * choice.lognormvariate(0, 0.5) for value in popularity]


def nothing(_: random.Random) -> list[float]:
    return [0.0] * EXPERTS


ROWS: dict[str, Callable[[random.Random], list[float]]] = {
    "Zipf": zipf,
    "few hot": few_hot,
    "uniform": uniform,
    "correlated layers": correlated(random.Random(0)),
    "mostly unused": sparse,
    "one hot": one_hot,
    "no load": nothing,
}


def make_counts(name: str, layers: int = LAYERS, seed: int = 0) -> Counts:
    """Return whole numbers, as a recorder counts."""
    choice = random.Random(f"{name} {seed}")
    return [[float(int(load)) for load in ROWS[name](choice)] for _ in range(layers)]
