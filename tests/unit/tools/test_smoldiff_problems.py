"""smoldiff's problems: answers that can be checked, and a test that training never sees."""

import random
import re

import pytest

from tools.smoldiff.problems import held_out_problems, is_held_out, make_problem
from tools.smoldiff.wordings import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_test_share_no_problem(kind: str) -> None:
    chance = random.Random(1)
    trained = {make_problem(chance, kind).key for _ in range(300)}
    tested = {problem.key for problem in held_out_problems(20) if problem.kind == kind}
    assert not trained & tested
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, tested))


def test_words_for_the_test_are_never_in_training() -> None:
    chance = random.Random(1)
    assert not any("back to front" in make_problem(chance, "backwards").text for _ in range(300))
    assert any("back to front" in problem.text for problem in held_out_problems(20, other_words=True))


@pytest.mark.parametrize("kind", ["add", "subtract", "multiply"])
def test_every_step_of_a_calculation_is_right(kind: str) -> None:
    chance = random.Random(2)
    for _ in range(200):
        problem = make_problem(chance, kind)
        values = {eval(part.replace("x", "*")) for part in problem.answer.split(" = ")}
        assert len(values) == 1, problem
        assert set(re.findall(r"\d+", problem.answer.split(" = ")[0])) == set(re.findall(r"\d+", problem.text)), problem


def test_lists_are_sorted_and_reversed() -> None:
    chance = random.Random(3)
    for _ in range(100):
        numbers = [int(item) for item in make_problem(chance, "descending").answer.split(", ")]
        assert numbers == sorted(numbers, reverse=True)
        words = make_problem(chance, "alphabetical").answer.split(", ")
        assert words == sorted(words)
        turned = make_problem(chance, "reverse")
        items = turned.answer.split(", ")[::-1]
        assert ", ".join(items) in turned.text or " ".join(items) in turned.text


def test_letters_are_spelled_reversed_and_counted() -> None:
    chance = random.Random(4)
    for _ in range(100):
        spelled, turned = make_problem(chance, "spell"), make_problem(chance, "backwards")
        assert spelled.answer.replace("-", "") in spelled.text
        assert turned.answer[::-1] in turned.text
        counted = make_problem(chance, "count")
        found = re.fullmatch(r"The letter (.) occurs (\d+) times? in (\w+)\.", counted.answer)
        assert found is not None
        assert found[3].count(found[1]) == int(found[2])
