"""Models of the Hugging Face hub, through its own client: its cache, its token and HF_HUB_OFFLINE hold."""

import re
import sys
from pathlib import Path

from baton.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_FILES = (*_SMALL_FILES, "*.safetensors")


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name."""
    return _ID.fullmatch(model) is not None


def fetch_from_hub(model: str, weights: bool = True) -> Path:
    """Return the directory of a hub model, fetched if it is not in the hub's cache. Blocks. Raises ConfigError."""
    if not is_hub_id(model):
        raise ConfigError(f"{model!r} is no model id of the Hugging Face hub; those are owner/name")
    try:
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ConfigError(
            f"model {model!r} is no directory here, and fetching it needs the package huggingface_hub: "
            "pip install huggingface_hub"
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_FILES if weights else _SMALL_FILES)))
    except errors.GatedRepoError:
        problem = "you have not been given access to it; ask for it on its page, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = "the hub has no model of that name, or it is private; check the spelling, and set HF_TOKEN"
    except Exception as error:  # the hub's client lets through what its HTTP library raises
        offline = isinstance(error, errors.OfflineModeIsEnabled) or huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({type(error).__name__})"
        raise ConfigError(
            f"model {model!r} is no directory here, is not in the hub's cache, and {why}; "
            "give the path of a model directory, or one of the demo models with --model smollm2 or minilm"
        ) from error
    raise ConfigError(f"cannot fetch model {model!r}: {problem}")
