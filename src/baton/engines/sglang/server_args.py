"""Parses the arguments after `--` with SGLang's own parser, before anything starts."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engines.sglang.compat import import_sglang
from baton.engines.sglang.diffusion import check_diffusion
from baton.engines.sglang.experts import Parallelism, expert_arguments
from baton.engines.sglang.launch_mode import LaunchMode, own_flags, refuse_conflicts
from baton.engines.sglang.model_config import refuse_without_experts
from baton.engines.sglang.sglang_types import ServerArgs
from baton.errors import ConfigError


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked command line. `given` are the fields that it sets."""

    given: frozenset[str]
    values: Mapping[str, Any]

    @property
    def dp_size(self) -> int:
        """The number of schedulers, each with a KV cache of its own."""
        return int(self.values["dp_size"]) * int(self.values.get("attn_dp_size") or 1)

    @property
    def local_ranks(self) -> range:
        """The data-parallel ranks whose caches are on this machine."""
        nodes, size = int(self.values["nnodes"]), self.dp_size
        if nodes == 1 or size == 1:
            return range(size if nodes == 1 or self.leader else 0)
        share = size // nodes
        return range(int(self.values["node_rank"]) * share, (int(self.values["node_rank"]) + 1) * share)

    @property
    def leader(self) -> bool:
        """Whether this node receives requests."""
        return int(self.values["node_rank"]) == 0


def check_arguments(
    mode: LaunchMode,
    options: SglangOptions,
    args: tuple[str, ...],
    model_dir: Path,
    name: str,
    experts: ExpertOptions | None = None,
) -> Arguments:
    """Return the arguments to start SGLang with. Raises ConfigError, saying what to change. Imports SGLang."""
    dialect = import_sglang()
    parser = _parser()
    argv = _without_denials(parser, _merged(parser, args))
    named = _named(parser, argv)
    flags = own_flags(mode, options, model_dir, name, dialect, frozenset(named))
    try:
        values = vars(parser.parse_args([*flags, *argv]))
    except ConfigError as error:
        raise ConfigError(f"SGLang does not accept its arguments: {error.message}") from None
    if more := _expert_flags(parser, experts, values, named):
        refuse_without_experts(model_dir)
        values = vars(parser.parse_args([*flags, *more, *argv]))
    refuse_conflicts(mode, {dest: values[dest] for dest in named if dest in values}, named)
    check_diffusion(values, model_dir)
    if values["device"] is None:
        _refuse_without_accelerator()
    return Arguments(given=frozenset(named), values=values)


def make_server_args(arguments: Arguments, more: Mapping[str, object]) -> ServerArgs:
    """Return SGLang's settings for one start; `more` overrides the arguments. Raises ConfigError."""
    from sglang.srt.server_args import ServerArgs as Settings

    parsed = argparse.Namespace(**{**arguments.values, **more})
    parsed._radix_eviction_policy_explicitly_set = "radix_eviction_policy" in arguments.given
    try:
        made: ServerArgs = Settings.from_cli_args(parsed)
    except Exception as error:  # its checks raise any type
        raise ConfigError(f"SGLang does not accept its arguments: {error}") from error
    return made


def help_text() -> str:
    """Return the help text of SGLang's own arguments. Imports SGLang."""
    import_sglang()
    return _parser().format_help()


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ConfigError(message or "--help is not an argument of an engine; see --help-engine")


def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs as Settings

    parser = _Parser(prog="baton worker --engine sglang --", allow_abbrev=False, add_help=False)
    Settings.add_cli_args(parser)
    return parser


def _merged(parser: argparse.ArgumentParser, args: tuple[str, ...]) -> list[str]:
    """Return the arguments with those of the file that --config names, if any."""
    if "--config" not in args:
        return list(args)
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    try:
        merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(list(args))
    except Exception as error:  # a file that is not there, not YAML, or not a mapping
        raise ConfigError(f"--config: {error}") from error
    return merged


def _without_denials(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Return `argv` without switches set to false, which SGLang's parser cannot express."""
    switches = {name for name, action in parser._option_string_actions.items() if action.nargs == 0}
    return [arg for arg in argv if not (arg.endswith("=false") and arg.removesuffix("=false") in switches)]


def _named(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, str]:
    """Return the fields that a command line sets, with their spelling there."""
    actions = parser._option_string_actions
    options = [arg.split("=", 1)[0] for arg in argv if arg.startswith("-")]
    return {actions[option].dest: option for option in options if option in actions}


def _expert_flags(
    parser: argparse.ArgumentParser, experts: ExpertOptions | None, values: Mapping[str, Any], named: Mapping[str, str]
) -> list[str]:
    """Return the flags of the --experts-* settings."""
    if experts is None:
        return []
    flags = expert_arguments(experts, Parallelism.of(values))
    for dest in _named(parser, flags):
        if dest in named:
            raise ConfigError(f"{named[dest]}: it is also set by an --experts-* option; drop one of them")
    return flags


def _refuse_without_accelerator() -> None:
    import torch

    if not torch.accelerator.is_available():
        raise ConfigError("SGLang finds no GPU here; to run it on the CPU, add `-- --device cpu`")
