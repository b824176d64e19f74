"""The pages of the documentation, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SHELLS = ("console", "sh", "bash", "shell")
PROGRAMS = ("baton", "make", "curl", "pip", "python", "lm_eval", "kubectl", "helm", "docker", "systemctl")
_FENCE = re.compile(r"^(\s*)```(\S*)\s*$")
_INLINE = re.compile(r"`(baton (?:serve|worker|frontend|router|ctl|experts)\b[^`]*)`")
_PLACEHOLDER = re.compile(r"\b(?:MODEL|FILE|WORKER|COMMAND|DIR|DUMP|N)\b|\.\.\.")


class Block(NamedTuple):
    """A fenced block, with the number of its first line."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]


class Command(NamedTuple):
    """A command as the page has it, continued lines included, and what the page shows as its output."""

    page: str
    line: int
    text: str
    shown: tuple[str, ...] = ()


def pages() -> list[str]:
    """Return the paths of all pages, from the root of the repository."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    opened: tuple[int, str] | None = None
    indent = ""
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence is not None:
            indent, opened, lines = fence[1], (number + 1, fence[2]), []
        elif opened is not None and fence is not None and not fence[2]:
            yield Block(page, *opened, tuple(lines))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(indent))


def commands(page: str) -> list[Command]:
    """Return the commands in the shell blocks of a page, in their order."""
    return [command for block in blocks(page) if block.language in SHELLS for command in _commands(block)]


def inline_commands(page: str) -> list[Command]:
    """Return the `baton` commands in the running text of a page that name no placeholder."""
    found = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        found += [Command(page, number, text) for text in _INLINE.findall(line) if not _PLACEHOLDER.search(text)]
    return found


def _commands(block: Block) -> Iterator[Command]:
    """A console block marks commands by `$ `, and has their output; every line of another one is a command."""
    marked = block.language == "console"
    pending: list[str] = []
    start = 0
    shown: list[str] = []
    done: Command | None = None
    for number, line in enumerate(block.lines, block.line):
        if pending:
            pending.append(line)
        elif not marked or line.startswith("$ "):
            if done is not None:
                yield done._replace(shown=tuple(shown))
                done, shown = None, []
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            pending, start = [line.removeprefix("$ ") if marked else line], number
        else:
            shown.append(line)
            continue
        text = "\n".join(pending)
        if is_complete(text):
            done, pending = Command(block.page, start, text), []
    assert not pending, f"{block.page}:{start}: the command does not end: {pending}"
    if done is not None:
        yield done._replace(shown=tuple(shown))


def is_complete(text: str) -> bool:
    """Whether a shell would run `text` instead of asking for another line."""
    if text.rstrip().endswith("\\"):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def looks_like_command(line: str) -> bool:
    """Whether a line of a block begins as a command does."""
    return line.removeprefix("$ ").split(" ")[0] in PROGRAMS
