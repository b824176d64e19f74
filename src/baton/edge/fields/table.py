"""The table of the fields of a request: which values are valid, and what happens to them.

A field is one of:

    honoured    passed on unchanged
    translated  changed into what the frontend takes
    refused     a 400 that names it, unless its value asks for nothing
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from baton.edge.errors import FieldError

Json = dict[str, object]
Rule = Literal["honoured", "translated", "refused"]
Apply = Callable[[Json], Json]
"""Called with a body that has the field. Returns the body to go on with: the same object if nothing changes."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field: its type, what becomes of it, and a sentence about it for the documentation."""

    name: str
    type: object
    rule: Rule
    note: str = ""
    required: bool = False
    apply: Apply | None = None


class Table:
    """The fields of one route."""

    def __init__(self, name: str, fields: Iterable[Field], complete: Apply | None = None) -> None:
        """Prepare. `complete` is applied to every body, before the fields."""
        self.name = name
        self.fields = {field.name: field for field in fields}
        self.complete = complete
        self.type = _struct(name, self.fields.values())
        self.steps = {field.name: field.apply for field in self.fields.values() if field.apply is not None}

    def apply(self, body: Json) -> Json:
        """Return the body to forward: the same object if nothing changes. Its types have been checked."""
        if self.complete is not None:
            body = self.complete(body)
        for name in self.steps.keys() & body.keys():
            body = self.steps[name](body)
        return body


def _struct(name: str, fields: Iterable[Field]) -> type[msgspec.Struct]:
    """Return the type that validates a body. Fields are optional, and null counts as absent, unless required."""
    members: list[tuple[str, object] | tuple[str, object, object]] = []
    for field in fields:
        kind: Any = field.type
        members.append((field.name, kind) if field.required else (field.name, kind | None, None))
    return msgspec.defstruct(name, members, kw_only=True, forbid_unknown_fields=True)


def honoured(name: str, kind: object, note: str = "", required: bool = False, check: Apply | None = None) -> Field:
    """Return a field that is passed on. `check` may still refuse it next to other fields."""
    return Field(name=name, type=kind, rule="honoured", note=note, required=required, apply=check)


def translated(name: str, kind: object, apply: Apply, note: str) -> Field:
    """Return a field that `apply` changes into what the frontend takes."""
    return Field(name=name, type=kind, rule="translated", note=note, apply=apply)


def ignored(name: str, kind: object, note: str) -> Field:
    """Return a field that by its definition changes no answer; it is removed."""
    return Field(name=name, type=kind, rule="honoured", note=note, apply=lambda body: without(body, name))


def refused(name: str, reason: str, kind: object = object, neutral: tuple[object, ...] = ()) -> Field:
    """Return a field that is refused, unless its value is null or one of `neutral`, which ask for nothing."""

    def apply(body: Json) -> Json:
        if body[name] is not None and body[name] not in neutral:
            raise unsupported(name, reason)
        return without(body, name)

    accepted = f" Accepted: {', '.join(f'`{_literal(value)}`' for value in neutral)}." if neutral else ""
    return Field(name=name, type=kind, rule="refused", note=reason + "." + accepted, apply=apply)


def unsupported(param: str, reason: str) -> FieldError:
    """Return the error for a field that is not supported."""
    return FieldError(param, f"Unsupported parameter: '{param}': {reason}.", code="unsupported_parameter")


def without(body: Json, *names: str) -> Json:
    """Return the body without these fields."""
    return {name: value for name, value in body.items() if name not in names}


def _literal(value: object) -> str:
    return msgspec.json.encode(value).decode()
