"""Validation errors in the words that OpenAI's API uses, with the path of the field as `param`.

msgspec's own errors say what it expected and where; this module only rewords them.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from baton.edge.errors import FieldError

_PLACE = re.compile(r" - at `\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_TYPE = re.compile(r"Expected `(?P<wanted>.*)`, got `(?P<got>.*)`$")
_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)$", re.DOTALL)
_RANGE = re.compile(r"Expected `(?P<kind>int|float)` (?P<sign><=|>=|<|>) (?P<limit>\S+)$")
_LENGTH = re.compile(r"Expected `(?P<kind>\w+)` of length (?P<sign><=|>=) (?P<limit>\d+)$")
_STEP = re.compile(r"\[(?P<index>\d+)\]|\[\.\.\.\]|\.(?P<key>\w+)")

_NOUNS = {
    "int": "an integer",
    "float": "a decimal",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_SCALES = {"int": "integer", "float": "decimal", "array": "array", "str": "string", "object": "object"}


def field_error(error: msgspec.ValidationError, body: object, kind: type[msgspec.Struct]) -> FieldError:
    """Return the error for a client whose `body` is not a valid `kind`."""
    text = str(error)
    place = _PLACE.search(text)
    steps = _steps(place["path"]) if place else []
    if place:
        text = text[: place.start()]
    for pattern, build in _WORDINGS:
        if match := pattern.match(text):
            return build(match, steps, body, kind)
    return FieldError(_path(steps) or None, f"{text}.", code="invalid_value")


Steps = Sequence[str | int]


def _steps(path: str) -> list[str | int]:
    found: list[str | int] = []
    for step in _STEP.finditer(path):
        if step["index"] is not None:
            found.append(int(step["index"]))
        elif step["key"] is not None:
            found.append(step["key"])
    return found


def _path(steps: Iterable[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _missing(match: re.Match[str], steps: Steps, body: object, kind: type[msgspec.Struct]) -> FieldError:
    param = _path([*steps, match["name"]])
    return FieldError(param, f"Missing required parameter: '{param}'.", code="missing_required_parameter")


def _unknown(match: re.Match[str], steps: Steps, body: object, kind: type[msgspec.Struct]) -> FieldError:
    param = _path([*steps, match["name"]])
    known = f"Unknown parameter: '{param}'." if steps else f"Unrecognized request argument supplied: {param}"
    return FieldError(param, known, code="unknown_parameter")


def _type(match: re.Match[str], steps: Steps, body: object, kind: type[msgspec.Struct]) -> FieldError:
    wanted = [_NOUNS.get(name, name) for name in match["wanted"].split(" | ") if name != "null"]
    expected = wanted[0] if len(wanted) == 1 else f"one of {', '.join(wanted[:-1])} or {wanted[-1]}"
    got = _NOUNS.get(match["got"], match["got"])
    if not steps:
        return FieldError(None, f"Invalid body: expected {expected}, but got {got} instead.", code="invalid_type")
    param = _path(steps)
    message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
    return FieldError(param, message, code="invalid_type")


def _value(match: re.Match[str], steps: Steps, body: object, kind: type[msgspec.Struct]) -> FieldError:
    values = dict.fromkeys(_values(msgspec.inspect.type_info(kind), steps))
    supported = f" Supported values are: {', '.join(map(repr, values))}." if values else ""
    return FieldError(_path(steps), f"Invalid value: {match['value']}.{supported}", code="invalid_value")


def _range(match: re.Match[str], steps: Steps, body: object, kind: type[msgspec.Struct]) -> FieldError:
    side, word = ("max", "above maximum") if match["sign"].startswith("<") else ("min", "below minimum")
    scale, param = _SCALES[match["kind"]], _path(steps)
    limit = match["limit"].removesuffix(".0")
    value = _at(body, steps)
    got = f", but got {value} instead" if isinstance(value, int | float) else ""
    message = f"Invalid '{param}': {scale} {word} value. Expected a value {match['sign']} {limit}{got}."
    return FieldError(param, message, code=f"{scale}_{word.split()[0]}_{side}_value")


def _length(match: re.Match[str], steps: Steps, body: object, kind: type[msgspec.Struct]) -> FieldError:
    noun, param, value = _SCALES.get(match["kind"], match["kind"]), _path(steps), _at(body, steps)
    got = len(value) if isinstance(value, str | list | dict) else 0
    article = "an" if noun[0] in "aeiou" else "a"
    if got == 0:
        end = f"Expected {article} {noun} with minimum length {match['limit']}, but got an empty {noun} instead."
        return FieldError(param, f"Invalid '{param}': empty {noun}. {end}", code=f"empty_{noun}")
    side, word = ("maximum", "long") if match["sign"] == "<=" else ("minimum", "short")
    end = f"Expected {article} {noun} with {side} length {match['limit']}, but got one with length {got} instead."
    code = f"{noun}_{'above_max' if side == 'maximum' else 'below_min'}_length"
    return FieldError(param, f"Invalid '{param}': {noun} too {word}. {end}", code=code)


_WORDINGS = (
    (_MISSING, _missing),
    (_UNKNOWN, _unknown),
    (_TYPE, _type),
    (_RANGE, _range),
    (_LENGTH, _length),
    (_VALUE, _value),
)


def _at(body: object, steps: Steps) -> object:
    """Return the value at a path of the body, None for a key of a mapping, which the path does not name."""
    for step in steps:
        try:
            body = body[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return body


def _values(info: msgspec.inspect.Type, steps: Steps) -> list[object]:
    """Return the values that the type allows at a path: those of a literal, or the tags of a union of structs."""
    kinds = _alternatives(info)
    if not steps:
        return [value for each in kinds if isinstance(each, msgspec.inspect.LiteralType) for value in each.values]
    return [value for each in kinds for value in _values_within(each, steps[0], steps[1:])]


def _values_within(info: msgspec.inspect.Type, step: str | int, rest: Steps) -> list[object]:
    if isinstance(info, msgspec.inspect.ListType):
        return _values(info.item_type, rest)
    if not isinstance(info, msgspec.inspect.StructType):
        return []
    if info.tag_field == step:
        return [info.tag]
    return [value for field in info.fields if field.name == step for value in _values(field.type, rest)]


def _alternatives(info: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    return info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
