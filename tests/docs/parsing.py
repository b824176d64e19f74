"""Whether a documented command would be accepted: parsed by the program's own parser, without running it."""

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import click

from baton.cli.main import cli
from baton.config.load import load, options
from baton.control.http.command_table import COMMAND_PATHS
from baton.edge.fields.prepare import TABLES
from baton.errors import ConfigError
from tests.docs.pages import ROOT

Words = list[str]

_OPERATORS = ("|", "||", "&&", ";", "&", "2>&1")
_REDIRECTIONS = (">", ">>")
_FILE = [""]
_ASSIGNMENT = re.compile(r"\w+=")
_EDGE_PATHS = {"/v1/models", "/health", "/live", "/metrics", "/version", "/openapi.json", "/tokenize", "/detokenize"}
_SYSTEM_PATHS = {"/live", "/health", "/metrics", "/openapi.json"}
# Commands of other people's programs, which are checked no further.
_TRUSTED = {"cd", "export", "kill", "pgrep", "grep", "cat", "echo", "sleep", "tail", "ps", "ls", "mkdir", "jq"}


class Refused(Exception):
    """A command that its program would not accept, with the reason."""


class Incomplete(Refused):
    """A command that lacks an argument."""


def check(text: str) -> None:
    """Raise Refused if a command line, with its pipes and lists, has a part that its program does not accept."""
    for words in simple_commands(text):
        _check_words(words)


def check_mention(text: str) -> None:
    """Raise Refused if a `baton` command in running text, which may lack a value, names what does not exist."""
    try:
        check_baton(shlex.split(text)[1:])
    except Incomplete:
        return
    except Refused as error:
        if "unexpected extra argument" not in str(error):  # `ps` shows more words
            raise


def simple_commands(text: str) -> list[Words]:
    """Return the simple commands of a command line, without assignments and redirections."""
    text = re.sub(r"\$\([^()]*\)", "SUBSTITUTED", text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    parts: list[Words] = [[]]
    for word in lexer:
        if parts[-1] == _FILE:
            parts[-1] = []  # the name of a file that output goes to
        elif word in _REDIRECTIONS:
            parts.append(list(_FILE))
        elif word in _OPERATORS:
            parts.append([])
        else:
            parts[-1].append(word)
    found = []
    for part in parts:
        while part and _ASSIGNMENT.match(part[0]):
            part = part[1:]
        if part and part[0] == "sudo":
            part = part[1:]
        if part:
            found.append(part)
    return found


def _check_words(words: Words) -> None:
    program = Path(words[0]).name
    if program in _TRUSTED:
        return
    checker = _CHECKERS.get(program)
    if checker is None:
        raise Refused(f"no rule knows the program {program}")
    checker(words[1:])


def check_baton(args: Words) -> None:
    """Parse the arguments of `baton` as its main function does, down to the last subcommand."""
    ours = args[: args.index("--")] if "--" in args else args
    command: click.Command = cli
    context = click.Context(cli, info_name="baton")
    while isinstance(command, click.Group):
        if not ours or ours[0] in ("--help", "-h", "--version"):
            return
        found = command.get_command(context, ours[0])
        if found is None:
            raise Refused(f"`baton` has no command {ours[0]}")
        command, ours = found, ours[1:]
        if {"--help", "--help-all", "--help-engine"} & set(ours):
            return
        context = click.Context(command, info_name=command.name, parent=context, **command.context_settings)
    try:
        command.parse_args(context, list(ours))
    except click.exceptions.Exit:
        return
    except (click.MissingParameter, click.BadOptionUsage) as error:
        raise Incomplete(error.format_message()) from None
    except click.ClickException as error:
        raise Refused(error.format_message()) from None
    if command.name == "ctl":
        _check_control(context.params)
    elif "config" in context.params:
        _check_settings(context.params, args[len(ours) :] if len(ours) < len(args) else [])


def _check_settings(params: dict[str, object], engine_args: Words) -> None:
    """Load the settings as the command does, unless they are in a file that only the reader has."""
    files = [ROOT / str(params[name]) for name in ("config", "topology") if params.get(name)]
    if not all(file.exists() for file in files):
        return
    named = {option.key.replace(".", "_"): option for option in options()}
    flags: dict[str, object] = {}
    for name, value in params.items():
        if name in named and value not in (None, ()):
            flags[named[name].key] = ",".join(value) if isinstance(value, tuple) else value
    if "topology" in flags:
        flags["topology"] = str(ROOT / str(flags["topology"]))
    if engine_args:
        flags["engine_args"] = tuple(engine_args)
    try:
        load(flags, {}, ROOT / str(params["config"]) if params.get("config") else None)
    except ConfigError as error:
        raise Refused(error.message) from None


def _check_control(params: dict[str, object]) -> None:
    name, fields = params.get("command"), params.get("fields") or ()
    if name is None:
        return
    entries = [entry for entry in COMMAND_PATHS if entry.path == str(name).strip("/")]
    if not entries:
        raise Refused(f"the control API has no command {name}")
    known = {field for entry in entries if entry.command for field in entry.command.__struct_fields__}
    for field in fields if isinstance(fields, tuple) else ():
        flag = str(field).removeprefix("--").partition("=")[0].replace("-", "_")
        if str(field).startswith("--") and flag not in known:
            raise Refused(f"{name} has no field {flag}")


def _check_make(args: Words) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in args:
        if not _ASSIGNMENT.match(word) and word not in targets:
            raise Refused(f"the Makefile has no target {word}")
        if word.startswith("ARGS=") and args[0] == "serve":
            check_baton(["serve", *shlex.split(word.removeprefix("ARGS="))])


def _check_pip(args: Words) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in args:
        if re.match(r"baton(?!-serve)\b", word):
            raise Refused(f"the package is baton-serve, and not {word}")
        if (found := re.fullmatch(r"baton-serve\[([\w,]+)\]", word)) is not None:
            for extra in found[1].split(","):
                if extra not in extras:
                    raise Refused(f"the package has no extra {extra}")


def _check_files(args: Words) -> None:
    """Check the files of the repository that other people's programs get."""
    for word in args:
        if word.startswith("deploy/") and not any(ROOT.glob(word.rstrip("/"))):
            raise Refused(f"there is no file {word}")


def _check_python(args: Words) -> None:
    if args[:1] == ["-m"] and importlib.util.find_spec(args[1]) is None:
        raise Refused(f"there is no module {args[1]}")
    if args and args[0].endswith(".py") and not (ROOT / args[0]).exists():
        raise Refused(f"there is no file {args[0]}")


def _check_curl(args: Words) -> None:
    values = {number + 1 for number, word in enumerate(args) if word in ("-H", "-d", "--data", "-X", "-o", "-m")}
    urls = [word for number, word in enumerate(args) if number not in values and not word.startswith("-")]
    if len(urls) != 1:
        raise Refused(f"curl needs one URL, and has {urls}")
    path = "/" + re.sub(r"^(?:https?://)?[^/]*/?", "", urls[0]).split("?")[0]
    if urls[0].startswith("$W"):
        path = "/control" + path
    body = next((args[number + 1] for number, word in enumerate(args[:-1]) if word in ("-d", "--data")), None)
    if path.startswith("/control/"):
        if path.removeprefix("/control/") not in {entry.path for entry in COMMAND_PATHS}:
            raise Refused(f"the control API has no {path}")
    elif path not in TABLES and path not in _EDGE_PATHS | _SYSTEM_PATHS:
        raise Refused(f"no server has a route {path}")
    if body is not None and not body.startswith("@"):
        _check_body(path, body)


def _check_body(path: str, body: str) -> None:
    try:
        content = json.loads(body)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    table = TABLES.get(path)
    for name in content if table is not None else ():
        if table is not None and name not in table.fields:
            raise Refused(f"{path} has no field {name}")


_CHECKERS: dict[str, Callable[[Words], None]] = {
    "baton": check_baton,
    "make": _check_make,
    "pip": _check_pip,
    "python": _check_python,
    "curl": _check_curl,
    "python3": _check_python,
    "kubectl": _check_files,
    "helm": _check_files,
    "docker": _check_files,
    "promtool": _check_files,
    "prometheus": _check_files,
    "cp": _check_files,
    "systemctl": lambda args: None,
    "openssl": lambda args: None,
    "aiperf": lambda args: None,
    "guidellm": lambda args: None,
    "git": lambda args: None,
    "sysctl": lambda args: None,
    "lm_eval": lambda args: None,
}
