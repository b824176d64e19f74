"""The page about routing policies shows the example as it is, and its tests pass."""

from tests.docs.pages import ROOT, blocks

PAGE = "docs/writing-a-routing-policy.md"


def python_blocks() -> list[str]:
    return ["\n".join(block.lines) for block in blocks(PAGE) if block.language == "python"]


def test_the_policy_is_that_of_the_example() -> None:
    policy, _ = python_blocks()
    assert policy in (ROOT / "examples" / "routing_policy.py").read_text()


def test_the_tests_on_the_page_pass() -> None:
    _, tests = python_blocks()
    names: dict[str, object] = {}
    exec(tests, names)
    called = [each() for name, each in names.items() if name.startswith("test_") and callable(each)]
    assert len(called) == 2
