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
WORDS = "tuple"

Tree = dict[str, object]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, with its name in every place."""

    path: tuple[str, ...]
    kind: str
    choices: tuple[str, ...]
    default: object
    description: str
    commands: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its place in the YAML file, sections joined by dots."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """Its command-line flag; words for the engine come after everything else."""
        if self.kind == WORDS:
            return "-- WORDS"
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
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
    return list(_walk(Settings, (), ("serve", "worker", "frontend", "router")))


def load(flags: Mapping[str, object], variables: Mapping[str, str], file: Path | None) -> Settings:
    """Return the settings. `flags` are by option key, None if not given. Raises ConfigError, naming the setting."""
    tree: Tree = {}
    given = _read_file(file) if file is not None else {}
    topology = flags.get("topology") or variables.get(f"{PREFIX}TOPOLOGY") or given.get("topology")
    if topology:
        _merge(tree, _topology_settings(Path(str(topology))), f"settings of {topology}")
    _merge(tree, given, str(file))
    known = {option.variable: option for option in options()}
    for variable, text in sorted(variables.items()):
        if variable.startswith(PREFIX):
            if variable not in known:
                raise ConfigError(f"unknown environment variable {variable}; see `baton serve --help` for all settings")
            _put(tree, known[variable].path, _split(text) if known[variable].kind == WORDS else text)
    by_key = {option.key: option for option in options()}
    for key, value in flags.items():
        if value is not None:
            _put(tree, by_key[key].path, value)
    return _convert(tree)


def override(settings: Settings, content: Tree, source: str) -> Settings:
    """Return `settings` with what `content`, laid out as a file of settings, says otherwise. Raises ConfigError."""
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
    """Raise ConfigError for settings that are right one by one and not together."""
    if bool(settings.prefill) != bool(settings.decode):
        missing = "--decode" if settings.prefill else "--prefill"
        raise ConfigError(f"prefill and decode workers need each other: give {missing} too")
    if settings.prefill and settings.workers != 1:
        raise ConfigError(
            "--workers starts workers that do both prefill and decode: drop it, or --prefill and --decode"
        )
    if settings.topology and (settings.prefill or settings.encode or settings.workers != 1):
        raise ConfigError("--topology says which workers there are: drop --workers, --prefill, --decode and --encode")
    if settings.model_input == "text" and (settings.prefill or settings.role in ("prefill", "decode", "encode")):
        raise ConfigError(
            "prefill, decode and encode workers take tokens only, for the frontend that calls one after the other must"
            " know the prompt's tokens: drop --model-input text"
        )


def _explain(problem: str) -> str:
    """Return what is wrong with a value, with the names that its setting goes by."""
    what, _, place = problem.partition(" - at `$.")
    for option in options():
        if option.key == place.rstrip("`"):
            return f"bad value for {option.key} ({option.flag}, {option.variable}): {what}"
    return f"bad setting: {problem}"


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that make another process load these settings."""
    values: dict[str, str] = {}
    for option in options():
        value: object = settings
        for name in option.path:
            value = getattr(value, name)
        # Defaults too: the other process may inherit a variable that says otherwise.
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
            continue
        metas = [meta for meta in _metas(hint) if isinstance(meta, Meta)]
        extras = [meta.extra for meta in metas if meta.extra]
        bare = _bare(hint)
        yield Option(
            path=(*path, field.name),
            kind="choice" if get_origin(bare) is Literal else getattr(get_origin(bare) or bare, "__name__", "str"),
            choices=tuple(str(choice) for choice in get_args(bare)) if get_origin(bare) is Literal else (),
            default=field.default,
            description=next((meta.description for meta in reversed(metas) if meta.description), ""),
            commands=cast(tuple[str, ...], extras[-1]["commands"]) if extras else commands,
        )


def _metas(hint: object) -> tuple[object, ...]:
    if get_origin(hint) is not Annotated:
        return ()
    inner, *rest = get_args(hint)
    return (*_metas(inner), *rest)


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
    """Return the settings that a topology gives to all its workers. What else is in it, `router/files.py` reads."""
    settings = _read_file(file).get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"settings in {file} must hold a mapping of settings")
    if "topology" in settings:
        raise ConfigError(f"unknown setting topology in the settings of {file}")
    return settings


def _merge(tree: Tree, content: Tree, source: str) -> None:
    known = {option.key for option in options()}
    sections = {option.path[0] for option in options() if len(option.path) > 1}
    for key, value in content.items():
        if key in sections:
            if not isinstance(value, dict | None):
                raise ConfigError(f"{key} in {source} must hold a mapping of settings")
            for inner, inner_value in (value or {}).items():
                if f"{key}.{inner}" not in known:
                    raise ConfigError(f"unknown setting {key}.{inner} in {source}")
                _put(tree, (key, str(inner)), inner_value)
        elif key in known:
            tree[key] = _words(value) if key == "engine_args" else value
        else:
            raise ConfigError(f"unknown setting {key} in {source}")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"bad value for engine_args: {error} in {text!r}") from None


def _words(value: object, flag: str = "") -> object:
    """Return the words that a list or a mapping of a file stands for; a mapping inside another one has dotted names."""
    match value:
        case dict():
            inner = (_words(part, f"{flag}.{name}" if flag else f"--{name}") for name, part in value.items())
            return [word for words in inner for word in cast(list[str], words)]
        case None:
            return []
        case bool() if flag:
            return [flag] if value else [f"{flag}=false"]
        case list() if "." in flag:
            return [flag, json.dumps(value)]
        case list() if flag:
            return [flag, *map(_word, value)]
        case list():
            return [_word(part) for part in value]
        case _ if flag:
            return [flag, _word(value)]
        case str():
            return _split(value)
    return value


def _word(value: object) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    return json.dumps(value)


def _put(tree: Tree, path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        tree = cast(Tree, tree.setdefault(name, {}))
    tree[path[-1]] = value


def control_token(settings: Settings) -> str:
    """Return the token that orders must bring, "" for none. Raises ConfigError if its file does not have it."""
    if not settings.control_token_file:
        return settings.control_token
    if settings.control_token:
        raise ConfigError("--control-token and --control-token-file say the same: drop one of them")
    try:
        token = Path(settings.control_token_file).expanduser().read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read --control-token-file {settings.control_token_file}: {error}") from None
    if not token:
        raise ConfigError(f"--control-token-file {settings.control_token_file} is empty")
    return token
