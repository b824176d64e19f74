"""Chat templates: the model's own or a file of the user's, compiled in a sandbox."""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import meta
from jinja2.filters import do_trim
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError, InvalidRequest
from baton.models.template_messages import ContentFormat, template_messages

log = logging.getLogger(__name__)

Message = Mapping[str, object]


class ChatTemplate:
    """A compiled chat template, with the special tokens of its model. Safe to use from several threads."""

    def __init__(self, source: str, origin: Path, special_tokens: Mapping[str, object]) -> None:
        """Compile `source`. Raises ConfigError with its `origin` for a syntax error."""
        self._template = compile_template(source, origin)
        self._special_tokens = special_tokens
        self._takes = self._content_format()

    def render(self, messages: Sequence[Message], variables: Mapping[str, object] | None = None) -> str:
        """Return the prompt; `variables` are the client's own. Raises InvalidRequest with the template's reason.

        Content is a text or a list of parts, whatever the template takes; parts of media are a placeholder each.
        Content that is absent is null, as OpenAI has it next to tool calls. Templates that cannot take null get "".
        """
        shaped = template_messages(messages, self._takes)
        complete = [message if "content" in message else {**message, "content": None} for message in shaped]
        try:
            return self._render(complete, variables)
        except InvalidRequest:
            if all(message["content"] is not None for message in complete):
                raise
        return self._render([{**message, "content": message["content"] or ""} for message in complete], variables)

    def _content_format(self) -> ContentFormat:
        """Return what the template takes as content, by what it prints for a message."""
        text, parts = "content of a message", [{"type": "text", "text": "content of a message"}]
        as_text, as_parts = self._try(text), self._try(parts)
        takes_text = text in as_text
        takes_parts = text in as_parts and str(parts) not in as_parts and json.dumps(parts) not in as_parts
        if takes_text == takes_parts:  # both, or a template that needs more than one message of a user
            return ContentFormat.BOTH
        return ContentFormat.TEXT if takes_text else ContentFormat.PARTS

    def _try(self, content: object) -> str:
        try:
            return self._render([{"role": "user", "content": content}], None)
        except InvalidRequest:
            return ""

    def _render(self, messages: Sequence[Message], variables: Mapping[str, object] | None) -> str:
        defaults = {**self._special_tokens, "add_generation_prompt": True}
        try:
            return self._template.render({**defaults, **(variables or {}), "messages": messages})
        except Exception as error:  # a template may raise anything for messages that it does not expect
            raise InvalidRequest(f"messages: the chat template of this model refuses them: {error}") from error


def load_chat_template(directory: Path, template_file: str = "") -> ChatTemplate | None:
    """Return the chat template in `template_file`, or of the model in `directory`. Raises ConfigError.

    Returns None if the model has none.
    """
    source = read_template_file(Path(template_file)) if template_file else read_chat_template(directory)
    if source is None:
        return None
    settings = _read_settings(directory)
    tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(source, Path(template_file) if template_file else directory, texts)


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
    template = directory / "chat_template.jinja"
    configured = _read_settings(directory).get("chat_template")
    try:
        source = configured or (template.read_text() if template.is_file() else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template in {directory}: {error}") from error
    # Models that take images may have it with the settings of their processor only.
    return source or _read_settings(directory, "chat_template.json").get("chat_template")


def _read_settings(directory: Path, name: str = "tokenizer_config.json") -> dict[str, object]:
    file = directory / name
    try:
        settings = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template in {directory}: {error}") from error
    return settings if isinstance(settings, dict) else {}


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
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_printed
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _format_now
    environment.filters["tojson"] = _to_json
    environment.filters["trim"] = _trim
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _format_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON for a prompt, with the options of transformers. Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _printed(value: object) -> object:
    """Return what is printed for a value: nothing for null, where Jinja prints "None"."""
    return "" if value is None else value


def _trim(value: object, characters: str | None = None) -> str:
    return do_trim(str(_printed(value)), characters)
