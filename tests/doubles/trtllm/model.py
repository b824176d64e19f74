"""The double's model: the next token is a function of all tokens before."""

import math
import random

SHARES = (0.5, 0.2, 0.15, 0.1, 0.05)
_MULTIPLIER = 6364136223846793005
_MASK = 2**64 - 1

START = 88172645463325252


def after(state: int, token: int) -> int:
    """Return the state after one more token. This is what the KV of a prompt stands for."""
    return ((state ^ (token + 1)) * _MULTIPLIER + 1442695040888963407) & _MASK


def after_all(state: int, tokens: list[int]) -> int:
    """Return the state after many tokens."""
    for token in tokens:
        state = after(state, token)
    return state


def likely(state: int, vocabulary: int) -> list[tuple[int, float]]:
    """Return the possible next tokens, the likeliest first, each with its log-probability."""
    first = (state >> 20) % (vocabulary - 1)
    tokens = [1 + (first + place * 17) % (vocabulary - 1) for place in range(len(SHARES))]
    return list(zip(tokens, (math.log(share) for share in SHARES), strict=True))


def choose(state: int, vocabulary: int, greedy: bool, chance: random.Random) -> int:
    """Return the next token."""
    options = likely(state, vocabulary)
    if greedy:
        return options[0][0]
    return chance.choices([token for token, _ in options], SHARES)[0]
