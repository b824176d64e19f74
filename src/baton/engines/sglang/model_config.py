"""What config.json says about a model, before SGLang reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


def read_config(model_dir: Path) -> Mapping[str, Any]:
    """Return the content, nothing if it cannot be read: SGLang reports that better."""
    try:
        content = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_without_experts(model_dir: Path) -> None:
    """Raise ConfigError for a model that has no experts. A family of models names their number in its own way."""
    config = read_config(model_dir)
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    if config and not any("expert" in key for part in parts for key in part):
        raise ConfigError("the model has no experts: drop the --experts-* settings")
