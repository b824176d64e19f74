"""`baton ctl`: orders to one worker from the command line, over the routes of its system server."""

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import cast

import click
import msgspec

from baton.control.http.command_table import PREFIX, ROUTES, Route
from baton.control.http.schemas import ProblemReply
from baton.protocol.commands import Command

EXIT_FAILED = 1
WAIT_S = 3700.0
"""Longer than any order may take."""

Json = dict[str, object]


class Refused(Exception):
    """The worker did not do it, or could not be reached."""


def _about_verbs() -> str:
    """Return what each verb does, and its fields."""
    width = max(len(route.path) for route in ROUTES) + 4
    lines = []
    for route in ROUTES:
        lines.append(f"  {route.path}".ljust(width) + route.summary.split(";")[0])
        if fields := " ".join(f"--{field.name.replace('_', '-')}" for field in _fields(route.command)):
            lines.append(" " * width + fields)
    return "\n".join(lines)


def _fields(kind: type[Command] | None) -> Sequence[msgspec.structs.FieldInfo]:
    return msgspec.structs.fields(kind) if kind is not None else ()


class _Command(click.Command):
    """A command whose help ends with the verbs, unwrapped."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        formatter.write(f"\nVerbs:\n{_about_verbs()}\n")


@click.command(
    cls=_Command,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS]",
)
@click.argument("worker")
@click.argument("command")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE | JSON]...")
@click.option("--token", envvar="BATON_CONTROL_TOKEN", help="token of the worker; better in BATON_CONTROL_TOKEN")
@click.option("--json", "raw", is_flag=True, help="print the reply as the worker sent it")
def ctl(worker: str, command: str, fields: tuple[str, ...], token: str | None, raw: bool) -> None:
    """Give one order to a WORKER: the port of its system server, host:port or a URL.

    A verb's fields are flags, lists separated by commas, or all of them one JSON object.
    """
    route = _route(command.strip("/"), bool(fields))
    body = _body(route, fields)
    try:
        reply = _call(f"{_address(worker)}{PREFIX}{route.path}", route.method, body, token)
    except Refused as problem:
        click.echo(f"baton: {problem}", err=True)
        sys.exit(EXIT_FAILED)
    click.echo(reply.decode() if raw else _readable(msgspec.json.decode(reply, type=Json)))


def _route(path: str, has_fields: bool) -> Route:
    """Return the route for `path`; where one tells and another sets, fields make the difference."""
    found = [route for route in ROUTES if route.path == path]
    if not found:
        raise click.UsageError(f"no verb {path!r}; there are {', '.join(dict.fromkeys(r.path for r in ROUTES))}")
    return next((route for route in found if (route.method == "POST") is has_fields), found[0])


def _address(worker: str) -> str:
    """Return the URL of a system server."""
    if "://" in worker:
        return worker.rstrip("/")
    host, _, port = worker.rpartition(":")
    if not port.isdigit():
        raise click.UsageError(f"{worker!r} is no worker: give its system port, host:port or a URL")
    return f"http://{host or '127.0.0.1'}:{port}"


def _body(route: Route, words: tuple[str, ...]) -> bytes | None:
    """Return the body of the order, checked as the worker will check it."""
    if route.method == "GET" or route.command is None:
        if words:
            raise click.UsageError(f"{route.path} has no fields")
        return None
    if len(words) == 1 and not words[0].startswith("--"):
        return _checked(words[0].encode(), route.command)
    values = _flags(route, route.command, words)
    try:
        return msgspec.json.encode(msgspec.convert(values, route.command, strict=False))
    except msgspec.ValidationError as error:
        raise click.UsageError(f"{route.path}: {error}") from None


def _checked(body: bytes, kind: type[Command]) -> bytes:
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise click.UsageError(str(error)) from None
    return body


def _flags(route: Route, kind: type[Command], words: tuple[str, ...]) -> Json:
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    values: Json = {}
    pending = list(words)
    while pending:
        word = pending.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in known:
            raise click.UsageError(f"{route.path} has no field {word!r}; it has {', '.join(known) or 'none'}")
        if not equals:
            if not pending:
                raise click.UsageError(f"{word} needs a value")
            text = pending.pop(0)
        values[name] = _value(known[name].type, text)
    return values


def _value(kind: object, text: str) -> object:
    """Return what `text` stands for in a field of `kind`: a list, an object in JSON, or itself."""
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
        raise click.UsageError(f"{text!r} is no JSON: {error}") from None


def _call(url: str, method: str, body: bytes | None, token: str | None) -> bytes:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=WAIT_S) as answer:
            return cast(bytes, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(_explained(error.code, error.read())) from None
    except (OSError, ValueError) as error:
        raise Refused(f"cannot reach {url}: {error}") from None


def _explained(status: int, body: bytes) -> str:
    try:
        problem = msgspec.json.decode(body, type=ProblemReply).error
    except msgspec.DecodeError:
        return f"the worker answered {status}"
    return f"{problem.code}: {problem.message}"


def _readable(reply: Json, indent: str = "") -> str:
    """Return a reply for people: a line for each field, lists in one line, the message first."""
    lines = [str(reply["message"])] if "message" in reply else []
    for name, value in reply.items():
        match value:
            case dict():
                lines.append(f"{indent}{name}:\n{_readable(value, indent + '  ')}")
            case list():
                lines.append(f"{indent}{name}: {', '.join(map(str, value)) or 'none'}")
            case _ if name != "message":
                lines.append(f"{indent}{name}: {_word(value)}")
    return "\n".join(lines)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
