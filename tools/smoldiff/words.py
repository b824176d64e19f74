"""Words to spell, reverse, sort and count in: English ones, made-up ones, and random letters."""

import random

ENGLISH = tuple(
    """
    apple banana cherry orange lemon grape strawberry blueberry pineapple melon peach plum apricot tomato potato carrot
    onion garlic pepper cabbage spinach mushroom bread butter cheese yogurt coffee sugar honey chocolate cookie pancake
    sandwich breakfast dinner kitchen table chair window door garden flower forest mountain river ocean island beach
    desert valley meadow village city street bridge castle tower church school library museum theatre hospital station
    airport market office factory farm house bedroom ceiling carpet pillow blanket mirror candle lantern bottle basket
    hammer ladder bucket needle scissors umbrella suitcase backpack wallet pocket jacket sweater trousers slipper button
    ribbon necklace bracelet diamond silver copper marble granite crystal thunder lightning rainbow sunshine shadow
    morning evening midnight summer winter autumn spring january february march april june july august september
    october november december monday tuesday wednesday thursday friday saturday sunday red green blue yellow purple
    black white brown grey pink cat dog horse rabbit squirrel elephant giraffe kangaroo crocodile dolphin penguin
    butterfly spider beetle sparrow eagle pigeon chicken turkey sheep goat donkey camel tiger lion leopard monkey
    father mother brother sister daughter grandmother uncle cousin friend neighbour teacher student doctor nurse
    farmer baker painter writer singer dancer soldier sailor pilot driver engineer scientist president minister
    computer keyboard screen printer telephone message letter number question answer language sentence paragraph
    grammar alphabet dictionary history geography mathematics physics chemistry biology philosophy literature music
    guitar violin trumpet piano football tennis swimming running cycling climbing holiday birthday present journey
    adventure mystery secret promise dream memory feeling happiness sadness anger courage wisdom knowledge patience
    freedom justice peace silence beautiful wonderful terrible difficult impossible important different interesting
    dangerous delicious expensive generous curious careful quick slow heavy light bright quiet hello world mississippi
    bookkeeper committee address successful necessary occurrence parallel embarrass accommodate rhythm queue
    """.split()  # noqa: SIM905
)
_VOWELS = ("a", "e", "i", "o", "u", "y", "ea", "ou", "ee", "oo", "ai")
_STARTS = (*"bcdfghjklmnpqrstvwxz", "br", "ch", "cl", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr", "qu", "kn")
_ENDS = ("", "", "", "n", "r", "s", "t", "l", "m", "ck", "ll", "ss", "ng", "nd", "rt", "st", "tt")


def make_word(chance: random.Random, longest: int = 14) -> str:
    """Return a word of 3 to `longest` letters."""
    kind = chance.random()
    if kind < 0.3:
        word = chance.choice(ENGLISH)
    elif kind < 0.75:
        syllables = (chance.choice(_STARTS) + chance.choice(_VOWELS) + chance.choice(_ENDS) for _ in range(4))
        word = "".join(list(syllables)[: chance.randrange(1, 5)])
    else:
        word = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randrange(3, longest + 1)))
    return word if 3 <= len(word) <= longest else make_word(chance, longest)
