"""`baton ctl`: sends a command to one worker, over the control API of its system server."""

import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

import click
import msgspec

from baton.cli.completions import complete_processes
from baton.cli.process_names import find_url, list_processes
from baton.config.directories import control_directory
from baton.control.http.command_table import COMMAND_PATHS, PREFIX, CommandPath
from baton.control.http.schemas import ProblemReply
from baton.control.http.token_file import find_token
from baton.errors import ConfigError
from baton.protocol.commands import Command

EXIT_FAILED = 1
TIMEOUT_S = 3700.0
"""Longer than any command may take."""
LIST = "list"
TOKEN_HINT = ". Give one that the worker was started with in BATON_CONTROL_TOKEN or with --token"

Json = dict[str, object]


class CommandFailed(Exception):
    """The worker refused the command, or could not be reached."""


def _describe_commands() -> str:
    """Return what each command does, and its fields."""
    width = max(len(entry.path) for entry in COMMAND_PATHS) + 4
    lines = []
    for entry in COMMAND_PATHS:
        lines.append(f"  {entry.path}".ljust(width) + entry.summary.split(";")[0])
        if fields := " ".join(f"--{field.name.replace('_', '-')}" for field in _fields(entry.command)):
            lines.append(" " * width + fields)
    return "\n".join(lines)


def _fields(kind: type[Command] | None) -> Sequence[msgspec.structs.FieldInfo]:
    return msgspec.structs.fields(kind) if kind is not None else ()


class _Command(click.Command):
    """A click command whose help ends with the commands of the control API, unwrapped."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        formatter.write(f"\nCommands:\n{_describe_commands()}\n")


@click.command(
    cls=_Command,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS]",
)
@click.argument("worker", shell_complete=complete_processes)
@click.argument("command", required=False, metavar="COMMAND")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE | JSON]...")
@click.option(
    "--token",
    envvar="BATON_CONTROL_TOKEN",
    help="token of the worker; prefer BATON_CONTROL_TOKEN, which process lists do not show. Not needed for a worker of"
    " the same user on this machine that was started without a token",
)
@click.option("--json", "raw", is_flag=True, help="print the worker's reply as JSON")
def ctl(worker: str, command: str | None, fields: tuple[str, ...], token: str | None, raw: bool) -> None:
    """Send a COMMAND to a WORKER: its name, the port of its system server, host:port or a URL.

    `baton ctl list` shows the workers of this user on this machine with their names. A worker of `baton serve` is
    worker-0 or, if there are several of that name, 8000/worker-0, with the port of the endpoint.

    Pass the command's fields as flags (lists separated by commas), or all of them as one JSON object.
    """
    if command is None:
        if worker != LIST:
            raise click.UsageError(f"give a command for {worker}; `baton ctl --help` lists them")
        click.echo(list_processes())
        return
    entry = _find(command.strip("/"), bool(fields))
    body = _body(entry, fields)
    try:
        address = _address(worker)
        reply = _send(f"{address}{PREFIX}{entry.path}", entry.method, body, token or _generated_token(address))
    except CommandFailed as problem:
        click.echo(f"baton: {problem}", err=True)
        sys.exit(EXIT_FAILED)
    click.echo(reply.decode() if raw else _readable(msgspec.json.decode(reply, type=Json)))


def _find(path: str, has_fields: bool) -> CommandPath:
    """Return the command at `path`; where GET reads a value and POST sets it, fields make the difference."""
    found = [entry for entry in COMMAND_PATHS if entry.path == path]
    if not found:
        known = ", ".join(dict.fromkeys(entry.path for entry in COMMAND_PATHS))
        raise click.UsageError(f"no command {path!r}; the commands are {known}")
    return next((entry for entry in found if (entry.method == "POST") is has_fields), found[0])


def _address(worker: str) -> str:
    """Return the URL of a system server."""
    if "://" in worker:
        return worker.rstrip("/")
    host, _, port = worker.rpartition(":")
    return f"http://{host or '127.0.0.1'}:{port}" if port.isdigit() else find_url(worker)


def _generated_token(address: str) -> str | None:
    """Return the token of a worker of this user and machine that was given none; None if there is none."""
    try:
        url = urllib.parse.urlsplit(address)
        return find_token(control_directory(), url.hostname or "", url.port or 80)
    except (ValueError, ConfigError):  # not a URL, which the request says, or no home directory
        return None


def _body(entry: CommandPath, args: tuple[str, ...]) -> bytes | None:
    """Return the body of the request, validated as the worker validates it."""
    if entry.method == "GET" or entry.command is None:
        if args:
            raise click.UsageError(f"{entry.path} has no fields")
        return None
    if len(args) == 1 and not args[0].startswith("--"):
        return _validated(args[0].encode(), entry.command)
    values = _flags(entry, entry.command, args)
    try:
        return msgspec.json.encode(msgspec.convert(values, entry.command, strict=False))
    except msgspec.ValidationError as error:
        raise click.UsageError(f"{entry.path}: {error}") from None


def _validated(body: bytes, kind: type[Command]) -> bytes:
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise click.UsageError(str(error)) from None
    return body


def _flags(entry: CommandPath, kind: type[Command], args: tuple[str, ...]) -> Json:
    """Return the fields in `args`, which are `--name value` or `--name=value`."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    values: Json = {}
    pending = list(args)
    while pending:
        arg = pending.pop(0)
        name, equals, text = arg.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not arg.startswith("--") or name not in known:
            raise click.UsageError(f"{entry.path} has no field {arg!r}; it has {', '.join(known) or 'none'}")
        if not equals:
            if not pending:
                raise click.UsageError(f"{arg} needs a value")
            text = pending.pop(0)
        values[name] = _value(known[name].type, text)
    return values


def _value(kind: object, text: str) -> object:
    """Return the value of `text` in a field of `kind`: a list, a JSON object, or the text itself."""
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.VarTupleType():
            return [part.strip() for part in text.split(",")]
        case msgspec.inspect.UnionType(types=types) if any(
            isinstance(option, msgspec.inspect.StructType) for option in types
        ):
            return _object(text)
        case _:
            return text


def _object(text: str) -> object:
    try:
        return cast(object, msgspec.json.decode(text))
    except msgspec.DecodeError as error:
        raise click.UsageError(f"{text!r} is not JSON: {error}") from None


def _send(url: str, method: str, body: bytes | None, token: str | None) -> bytes:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, data=body, headers=headers, method=method)
        with direct.open(request, timeout=TIMEOUT_S) as response:
            return cast(bytes, response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise CommandFailed(_error_message(error.code, error.read())) from None
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot reach {url}: {error}") from None


def _error_message(status: int, body: bytes) -> str:
    try:
        problem = msgspec.json.decode(body, type=ProblemReply).error
    except msgspec.DecodeError:
        return f"the worker replied with status {status}"
    hint = TOKEN_HINT if status == HTTPStatus.UNAUTHORIZED else ""
    return f"{problem.code}: {problem.message}{hint}"


def _readable(reply: Json, indent: str = "") -> str:
    """Return a reply as text: the message first, then a line per field, lists in one line."""
    lines = [str(reply["message"])] if "message" in reply else []
    for name, value in reply.items():
        match value:
            case dict():
                lines.append(f"{indent}{name}:\n{_readable(value, indent + '  ')}")
            case list():
                lines.append(f"{indent}{name}: {', '.join(map(str, value)) or 'none'}")
            case _ if name != "message":
                lines.append(f"{indent}{name}: {_shown(value)}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
