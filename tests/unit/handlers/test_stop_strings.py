"""Stop strings: the text that is sent does not depend on how it was cut."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.handlers.stop_strings import StopMatcher

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


def send(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    """Return the text sent for these pieces, and whether a stop string ended them."""
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        sent += matcher.push(piece)
        if matcher.stopped:
            return sent, True
    return sent + matcher.flush(), False


def cut_at_the_first_complete_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The rule, written plainly: the first stop string to be complete ends the text, where it began."""
    for end in range(len(text) + 1):
        places = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if places:
            return text[: min(places)], True
    return text, False


@given(LETTERS, STOPS, st.lists(st.integers(0, 14)))
@example("abb", ("abb", "b"), [])
@example("aab", ("ab",), [1, 2])
def test_the_text_sent_does_not_depend_on_how_it_is_split(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert send(pieces, stops) == cut_at_the_first_complete_stop(text, stops)


@given(LETTERS, STOPS)
def test_text_sent_early_is_always_a_prefix_of_the_whole(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    whole, _ = cut_at_the_first_complete_stop(text, stops)
    for letter in text:
        sent += matcher.push(letter)
        assert whole.startswith(sent)
        if matcher.stopped:
            break


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher(())
    assert matcher.push("text") == "text"
    assert (matcher.flush(), matcher.stopped) == ("", False)


@pytest.mark.parametrize(("text", "held"), [("x", ""), ("xE", "E"), ("xEN", "EN"), ("xENx", "")])
def test_only_a_possible_prefix_of_a_stop_string_is_held_back(text: str, held: str) -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push(text) == text.removesuffix(held) if held else text
    assert matcher.flush() == held
