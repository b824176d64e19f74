"""Loads settings: flags over environment variables (`BATON_*`) over a YAML file over defaults."""

import json
import shlex
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from baton.config.settings import Settings
from baton.errors import ConfigError

PREFIX = "BATON_"
ENGINE_ARGS = "tuple"
"""The kind of the one option that has no flag of its own: arguments after `--`."""

_PARSED_NEVER = {"auto", "none"}

Tree = dict[str, object]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, with its YAML key, flag and variable."""

    path: tuple[str, ...]
    kind: str
    choices: tuple[str, ...]
    default: object
    description: str
    commands: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    repeated: bool = False

    @property
    def key(self) -> str:
        """The key in the YAML file, sections joined by dots."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The command-line flag; engine arguments follow all others."""
        if self.kind == ENGINE_ARGS:
            return "-- ARGS"
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + "_".join(self.path).upper()


_SECTION_COMMANDS = {
    "runtime": ("serve", "worker", "frontend", "router"),
    "kv": ("serve", "worker"),
    "media": ("serve", "worker"),
    "torch": ("serve", "worker"),
    "sglang": ("serve", "worker"),
    "experts": ("serve", "worker"),
    "trtllm": ("serve", "worker"),
    "echo": ("serve", "worker"),
}


def options() -> list[Option]:
    """Return every setting, in the order of the structs."""
    return [each for each in _walk(Settings, (), ("serve", "worker", "frontend", "router")) if each.commands]


def load(flags: Mapping[str, object], variables: Mapping[str, str], file: Path | None) -> Settings:
    """Return the settings. `flags` maps option keys to values, None if not given. Raises ConfigError for a setting."""
    tree: Tree = {}
    given = _read_file(file) if file is not None else {}
    topology = flags.get("topology") or variables.get(f"{PREFIX}TOPOLOGY") or given.get("topology")
    if topology:
        _merge(tree, _topology_settings(Path(str(topology))), f"settings of {topology}")
    _merge(tree, given, str(file))
    _merge_variables(tree, variables)
    by_key = {option.key: option for option in options()}
    for key, value in flags.items():
        if value is not None:
            _put(tree, by_key[key].path, value)
    return _convert(tree)


def _merge_variables(tree: Tree, variables: Mapping[str, str]) -> None:
    known = {option.variable: option for option in options()}
    for variable, text in sorted(variables.items()):
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}; see `baton serve --help-all` for all settings")
        _put(tree, known[variable].path, _split(text) if known[variable].kind == ENGINE_ARGS else text)


def override(settings: Settings, content: Tree, source: str) -> Settings:
    """Return `settings` with the values of `content`, which has the layout of a settings file. Raises ConfigError."""
    tree: Tree = msgspec.to_builtins(settings)
    _merge(tree, content, source)
    return _convert(tree)


def _convert(tree: Tree) -> Settings:
    try:
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from None
    _refuse_contradictions(settings)
    return settings


def _refuse_contradictions(settings: Settings) -> None:
    """Raise ConfigError for settings that are valid one by one and not together."""
    _check_worker_counts(settings)
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        missing = "--tls-key" if settings.tls_certificate else "--tls-certificate"
        raise ConfigError(f"TLS needs a certificate and its key: add {missing}")
    if settings.router_policy and settings.router != "kv":
        raise ConfigError("a policy is applied by the KV router only: add --router kv, or drop --router-policy")
    if settings.model_input == "text":
        _check_text_input(settings)


def _check_text_input(settings: Settings) -> None:
    if settings.prefill or settings.role in ("prefill", "decode", "encode"):
        raise ConfigError(
            "prefill, decode and encode workers take tokens only, because the frontend calls several of them with the"
            " tokens of one prompt: drop --model-input text"
        )
    if settings.process or settings.role == "process":
        raise ConfigError("process workers take text and send tokens to the other workers: drop --model-input text")
    if not _PARSED_NEVER.issuperset((settings.tool_call_parser, settings.reasoning_parser)):
        raise ConfigError(
            "the frontend parses tool calls and reasoning only of workers that take tokens: drop --model-input text,"
            " or --tool-call-parser and --reasoning-parser"
        )


def _check_worker_counts(settings: Settings) -> None:
    if bool(settings.prefill) != bool(settings.decode):
        missing = "--decode" if settings.prefill else "--prefill"
        raise ConfigError(f"prefill and decode workers need each other: add {missing}")
    if settings.prefill and settings.workers != 1:
        raise ConfigError("--workers starts aggregated workers: drop it, or --prefill and --decode")
    if settings.topology and (settings.prefill or settings.workers != 1):
        raise ConfigError("--topology defines the workers: drop --workers, --prefill and --decode")


def _explain(problem: str) -> str:
    """Return the message for an invalid value, with the key, flag and variable of its setting."""
    what, _, place = problem.partition(" - at `$.")
    for option in options():
        if option.key == place.rstrip("`"):
            possible = f"; choose one of: {', '.join(option.choices)}" if option.choices else ""
            return f"bad value for {option.key} ({option.flag}, {option.variable}): {what}{possible}"
    return f"bad setting: {problem}"


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables from which another process loads these settings."""
    values: dict[str, str] = {}
    for option in options():
        value: object = settings
        for name in option.path:
            value = getattr(value, name)
        # Defaults too, because the other process may inherit a variable with another value.
        if isinstance(value, tuple):
            value = shlex.join(value)
        values[option.variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return values


def _walk(cls: type, path: tuple[str, ...], commands: tuple[str, ...]) -> Iterator[Option]:
    hints = get_type_hints(cls, include_extras=True)
    for field in msgspec.structs.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _walk(hint, (*path, field.name), _SECTION_COMMANDS[field.name])
        else:
            yield _option((*path, field.name), hint, field.default, commands)


def _option(path: tuple[str, ...], hint: object, default: object, commands: tuple[str, ...]) -> Option:
    metas = _metas(hint)
    extra: Mapping[str, object] = next((meta.extra for meta in reversed(metas) if meta.extra), {})
    descriptions = [meta.description for meta in metas if meta.description]
    bare = _bare(hint)
    choices = tuple(map(str, get_args(bare))) if get_origin(bare) is Literal else ()
    return Option(
        path=path,
        kind="choice" if choices else getattr(get_origin(bare) or bare, "__name__", "str"),
        choices=choices,
        default=default,
        description=descriptions[-1] if descriptions else "",
        commands=cast(tuple[str, ...], extra.get("commands", commands)),
        aliases=cast(tuple[str, ...], extra.get("aliases", ())),
        repeated=bool(extra.get("repeated")),
    )


def _metas(hint: object) -> list[Meta]:
    if get_origin(hint) is not Annotated:
        return []
    inner, *rest = get_args(hint)
    return [*_metas(inner), *(meta for meta in rest if isinstance(meta, Meta))]


def _bare(hint: object) -> object:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        raise TypeError("settings have one type each")
    return hint


def _read_file(file: Path) -> Tree:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping of settings")
    return content


def _topology_settings(file: Path) -> Tree:
    """Return the settings that a topology file gives to all its workers. `baton.router` reads the rest of the file."""
    settings = _read_file(file).get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"settings in {file} must hold a mapping of settings")
    if "topology" in settings:
        raise ConfigError(f"unknown setting topology in the settings of {file}")
    return settings


def _merge(tree: Tree, content: Tree, source: str) -> None:
    known = {option.key: option for option in options()}
    sections = {option.path[0] for option in options() if len(option.path) > 1}
    for key, value in content.items():
        if key in sections:
            _merge_section(tree, key, value, source)
        elif key in known:
            tree[key] = _value(known[key], value)
        else:
            raise ConfigError(f"unknown setting {key} in {source}")


def _merge_section(tree: Tree, section: str, content: object, source: str) -> None:
    if not isinstance(content, dict | None):
        raise ConfigError(f"{section} in {source} must hold a mapping of settings")
    known = {option.key for option in options()}
    for name, value in (content or {}).items():
        if f"{section}.{name}" not in known:
            raise ConfigError(f"unknown setting {section}.{name} in {source}")
        _put(tree, (section, str(name)), value)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"bad value for engine_args: {error} in {text!r}") from None


def _value(option: Option, value: object) -> object:
    """Return the value of `option` in a file as the setting has it."""
    if option.kind == ENGINE_ARGS:
        return _engine_args(value)
    return ",".join(map(str, value)) if option.repeated and isinstance(value, list) else value


def _engine_args(value: object) -> object:
    """Return the argument list for a value of `engine_args` in a file. Other types are returned unchanged."""
    match value:
        case dict():
            return _flags(value, "")
        case list():
            return [_argument(item) for item in value]
        case str():
            return _split(value)
        case None:
            return []
    return value


def _flags(mapping: Mapping[object, object], prefix: str) -> list[str]:
    """Return the flags of a mapping; a mapping inside another one gives dotted names."""
    return [
        argument
        for name, value in mapping.items()
        for argument in _flag(f"{prefix}.{name}" if prefix else f"--{name}", value)
    ]


def _flag(flag: str, value: object) -> list[str]:
    match value:
        case dict():
            return _flags(value, flag)
        case None:
            return []
        case bool():
            return [flag] if value else [f"{flag}=false"]
        case list() if "." not in flag:
            return [flag, *map(_argument, value)]
    return [flag, _argument(value)]


def _argument(value: object) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    return json.dumps(value)


def _put(tree: Tree, path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        tree = cast(Tree, tree.setdefault(name, {}))
    tree[path[-1]] = value


def control_token(settings: Settings) -> str:
    """Return the control API token, "" for none. Raises ConfigError if its file has none."""
    if not settings.control_token_file:
        return settings.control_token
    if settings.control_token:
        raise ConfigError("--control-token and --control-token-file are both set: drop one of them")
    try:
        token = Path(settings.control_token_file).expanduser().read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read --control-token-file {settings.control_token_file}: {error}") from None
    if not token:
        raise ConfigError(f"--control-token-file {settings.control_token_file} is empty")
    return token


def read_api_keys(file: Path) -> list[str]:
    """Return the keys in `file`, one per line; lines that begin with # are comments. Raises ConfigError."""
    try:
        lines = [line.strip() for line in file.expanduser().read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read --api-key-file {file}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no key")
    return keys


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated setting."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def an_api_key(settings: Settings) -> str | None:
    """Return one of the API keys, None if none is needed. Raises ConfigError."""
    given = listed(settings.api_key)
    if not given and settings.api_key_file:
        given = tuple(read_api_keys(Path(settings.api_key_file)))
    return given[0] if given else None
