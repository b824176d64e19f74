"""Synthetic pictures: coloured shapes and digits on a plain, graded or noisy background, with what is in them."""

import math
import random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 88, 214),
    "yellow": (240, 215, 30),
    "orange": (250, 130, 20),
    "purple": (130, 50, 180),
    "pink": (245, 130, 190),
    "brown": (125, 75, 40),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
BACKGROUNDS = ((255, 255, 255), (225, 225, 225), (190, 200, 215), (60, 60, 70), (240, 235, 220), (20, 30, 50))
MAX_COUNT = 6


class Thing(NamedTuple):
    """One shape or digit in a picture; `x` and `y` are the centre, as shares of the width and height."""

    kind: str  # a name of SHAPES, or a digit
    colour: str
    x: float
    y: float
    radius: float


class Scene(NamedTuple):
    """What is in a picture. `kind` is one of: single, pair, many, digit."""

    kind: str
    things: tuple[Thing, ...]
    background: int


def make_scene(chance: random.Random) -> Scene:
    """Make up a scene."""
    kind = chance.choices(("single", "pair", "many", "digit"), (2, 5, 3, 2))[0]
    background = chance.randrange(len(BACKGROUNDS))
    colours = [name for name in COLOURS if _differs(COLOURS[name], BACKGROUNDS[background])]
    if kind == "single":
        things = _placed(chance, [(chance.choice(SHAPES), chance.choice(colours))], (0.13, 0.38))
    elif kind == "digit":
        things = _placed(chance, [(str(chance.randrange(10)), chance.choice(colours))], (0.2, 0.42))
    elif kind == "pair":
        first, second = chance.sample(SHAPES, 2)
        colour = chance.sample(colours, 2)
        things = _placed(chance, [(first, colour[0]), (second, colour[1])], (0.12, 0.2))
    else:
        shape, colour_of_all = chance.choice(SHAPES), chance.choice(colours)
        count = chance.randrange(2, MAX_COUNT + 1)
        things = _placed(chance, [(shape, colour_of_all)] * count, (0.075, 0.12))
    return Scene(kind, things, background)


def draw(scene: Scene, chance: random.Random, size: int) -> Image.Image:
    """Draw a scene, `size` pixels wide and high."""
    image = _background(BACKGROUNDS[scene.background], chance, size)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        colour = _shade(COLOURS[thing.colour], chance)
        if thing.kind.isdigit():
            _draw_digit(pen, thing, colour, chance, size)
        else:
            _draw_shape(pen, thing, colour, chance, size)
    return image


def _differs(colour: tuple[int, int, int], background: tuple[int, int, int]) -> bool:
    return sum(abs(one - other) for one, other in zip(colour, background, strict=True)) > 150


def _placed(chance: random.Random, what: list[tuple[str, str]], radii: tuple[float, float]) -> tuple[Thing, ...]:
    """Place things so that none overlap; the first try that fits."""
    while True:
        radius = chance.uniform(*radii)
        places: list[tuple[float, float]] = []
        for _ in range(60):
            place = (chance.uniform(radius + 0.02, 0.98 - radius), chance.uniform(radius + 0.02, 0.98 - radius))
            if all(math.dist(place, other) > 2.35 * radius for other in places):
                places.append(place)
            if len(places) == len(what):
                return tuple(
                    Thing(kind, colour, x, y, radius) for (kind, colour), (x, y) in zip(what, places, strict=True)
                )


def _background(colour: tuple[int, int, int], chance: random.Random, size: int) -> Image.Image:
    generator = np.random.default_rng(chance.getrandbits(32))
    pixels = np.full((size, size, 3), colour, dtype=np.float32)
    style = chance.randrange(3)
    if style == 1:
        slope = np.linspace(-18, 18, size, dtype=np.float32)
        pixels += slope[:, None, None] if chance.random() < 0.5 else slope[None, :, None]
    elif style == 2:
        pixels += generator.normal(0, chance.uniform(2, 10), (size, size, 1)).astype(np.float32)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _shade(colour: tuple[int, int, int], chance: random.Random) -> tuple[int, int, int]:
    red, green, blue = (max(0, min(255, value + chance.randrange(-12, 13))) for value in colour)
    return red, green, blue


def _draw_digit(
    pen: ImageDraw.ImageDraw, thing: Thing, colour: tuple[int, int, int], chance: random.Random, size: int
) -> None:
    font = ImageFont.load_default(size=2 * thing.radius * size * chance.uniform(0.9, 1.15))
    stroke = chance.randrange(0, max(1, size // 60) + 1)
    at = (thing.x * size, thing.y * size)
    pen.text(at, thing.kind, fill=colour, font=font, anchor="mm", stroke_width=stroke)


def _draw_shape(
    pen: ImageDraw.ImageDraw, thing: Thing, colour: tuple[int, int, int], chance: random.Random, size: int
) -> None:
    x, y, radius = thing.x * size, thing.y * size, thing.radius * size
    if thing.kind == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        return
    turn = math.radians(chance.uniform(-12, 12))
    if thing.kind == "cross":
        _draw_cross(pen, (x, y), radius, turn, colour)
        return
    pen.polygon(_corners(thing.kind, (x, y), radius, turn), fill=colour)


def _corners(kind: str, centre: tuple[float, float], radius: float, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a polygon; `turn` is in radians."""
    if kind == "star":
        lengths = [radius if number % 2 == 0 else 0.42 * radius for number in range(10)]
        begin = -math.pi / 2
    elif kind == "triangle":
        lengths, begin = [radius] * 3, -math.pi / 2
    elif kind == "diamond":
        lengths, begin = [radius, 0.62 * radius, radius, 0.62 * radius], -math.pi / 2
    else:
        lengths, begin = [radius] * 4, -math.pi / 4
    step = 2 * math.pi / len(lengths)
    return [
        (
            centre[0] + length * math.cos(begin + turn + number * step),
            centre[1] + length * math.sin(begin + turn + number * step),
        )
        for number, length in enumerate(lengths)
    ]


def _draw_cross(
    pen: ImageDraw.ImageDraw, centre: tuple[float, float], radius: float, turn: float, colour: tuple[int, int, int]
) -> None:
    for angle in (turn, turn + math.pi / 2):
        along = (math.cos(angle), math.sin(angle))
        across = (-along[1], along[0])
        corners = [
            (
                centre[0] + radius * (one * along[0] + 0.3 * other * across[0]),
                centre[1] + radius * (one * along[1] + 0.3 * other * across[1]),
            )
            for one, other in ((-1, -1), (1, -1), (1, 1), (-1, 1))
        ]
        pen.polygon(corners, fill=colour)
