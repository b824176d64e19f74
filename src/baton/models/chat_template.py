"""Chat templates: the model's own or a file of the user's, compiled in a sandbox."""

import json
import logging
from pathlib import Path

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError

log = logging.getLogger(__name__)


def read_chat_template(directory: Path) -> str | None:
    """Return the chat template of the model in `directory`, or None if it has none. Raises ConfigError."""
    source = _read_source(directory)
    if source is None or isinstance(source, str):
        return source
    log.warning("ignoring the chat template in %s: it is a %s, not a string", directory, type(source).__name__)
    return None


def read_all_templates(directory: Path) -> str:
    """Return the text of the model's chat template, or of all of them if it has several. Raises ConfigError."""
    source = _read_source(directory)
    if not isinstance(source, list):
        return source if isinstance(source, str) else ""
    return "\n".join(str(named["template"]) for named in source if isinstance(named, dict) and "template" in named)


def _read_source(directory: Path) -> object:
    settings, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    try:
        configured = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
        return configured or (template.read_text() if template.is_file() else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template in {directory}: {error}") from error


def read_template_file(path: Path) -> str:
    """Return the chat template in `path`. Raises ConfigError if there is none."""
    try:
        source = path.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read --chat-template {path}: {error}") from None
    compile_template(source, path)
    if "messages" not in meta.find_undeclared_variables(_environment().parse(source)):
        raise ConfigError(f"--chat-template {path} is not a chat template: it does not use `messages`")
    return source


def compile_template(source: str, origin: Path) -> jinja2.Template:
    """Return the compiled template. Raises ConfigError with its `origin` for a syntax error."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"cannot read the chat template in {origin}: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
