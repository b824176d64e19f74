"""Models of the Hugging Face hub, fetched with its own client: its cache, token and HF_HUB_OFFLINE apply."""

import logging
import re
import sys
from pathlib import Path

from baton.config.disk_space import full_disk
from baton.errors import ConfigError

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
OFFLINE = "HF_HUB_OFFLINE is set"
_FILES = (*_SMALL_FILES, "*.safetensors")


def is_hub_id(model: str) -> bool:
    """Return whether `model` has the form owner/name."""
    return _ID.fullmatch(model) is not None


def fetch_from_hub(model: str, weights: bool = True) -> Path:
    """Return the directory of a hub model, fetched if it is not in the hub's cache. Blocks. Raises ConfigError."""
    if not is_hub_id(model):
        raise ConfigError(f"{model!r} is not a model id of the Hugging Face hub (owner/name)")
    try:
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ConfigError(
            f"model {model!r} is not a directory, and fetching it needs the package huggingface_hub: "
            "pip install huggingface_hub"
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_FILES if weights else _SMALL_FILES)))
    except errors.GatedRepoError:
        problem = "access is restricted; request access on its page, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = "it does not exist or is private; check the spelling, and set HF_TOKEN"
    except Exception as error:  # the client also raises errors of its HTTP library
        log.debug("cannot fetch %s from the hub: %r", model, error)
        offline = isinstance(error, errors.OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE
        constants = huggingface_hub.constants
        raise _failure(model, error, constants.HF_HUB_CACHE, "" if offline else constants.ENDPOINT) from error
    raise ConfigError(f"cannot fetch model {model!r}: {problem}")


def _failure(model: str, error: Exception, cache: str, address: str) -> ConfigError:
    """Return what the client's `error` means; `address` is that of the hub, "" if it must not be asked."""
    if full_disk(error) is not None:
        return ConfigError(
            f"cannot store model {model!r}: the disk of {cache} is full; free some space, or set HF_HOME to a directory"
            " on another disk"
        )
    reason = f"{address} cannot be reached ({type(error).__name__}): check the network" if address else OFFLINE
    return ConfigError(
        f"model {model!r} is not a directory, is not in the hub's cache, and {reason}; "
        "give the path of a model directory, or a demo model (smollm2 or minilm), with --model"
    )
