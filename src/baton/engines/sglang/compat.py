"""Which SGLang is installed, and the names of it that other versions spell differently. Checked once, at the start."""

import asyncio
import functools
import importlib.metadata
import itertools
import os
import warnings

import msgspec

from baton.errors import ConfigError

# What `make test-sglang` runs.
SUPPORTED = ("0.5.23",)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of SGLang calls things."""

    version: str
    stream_flag: str = "--incremental-streaming-output"
    dp_rank: str = "routed_dp_rank"
    salt: str = "cache_salt"


def supported_version() -> str:
    """Return the version of SGLang that is installed. Raises ConfigError, naming those that are known to work."""
    known = f"Baton works with {', '.join(SUPPORTED)}"
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"SGLang is not installed; {known}: pip install sglang=={SUPPORTED[-1]}") from None
    if version.split("+")[0] not in SUPPORTED:
        raise ConfigError(f"SGLang {version} is installed; {known}")
    return version


def choose_device(args: tuple[str, ...]) -> None:
    """Tell SGLang that it may run on a CPU, if its arguments say so; it asks the environment while it is imported."""
    pairs = [*itertools.pairwise(args), *(tuple(arg.split("=", 1)) for arg in args if "=" in arg)]
    if ("--device", "cpu") in pairs:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


@functools.cache
def import_sglang() -> Dialect:
    """Import SGLang and return its dialect. Takes seconds: call it off the event loop. Raises ConfigError."""
    version = supported_version()
    # Before SGLang: imported under SGLang's settings, it would keep the worker's own metrics in files as well.
    import prometheus_client  # noqa: F401

    policy = asyncio.get_event_loop_policy()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it names every kernel that this machine has no use for
            from sglang.srt.entrypoints import engine as _  # noqa: F401
    except Exception as error:  # whatever an import of a large package can raise
        raise ConfigError(f"SGLang {version} cannot be imported: {error}") from error
    finally:
        asyncio.set_event_loop_policy(policy)  # SGLang sets its own while it is imported
    return Dialect(version=version)
