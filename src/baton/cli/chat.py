"""`baton chat`: talks to a running server in the terminal, or answers what is piped into it."""

import sys
from contextlib import closing, suppress

import click

from baton.cli.chat_client import ChatClient, ChatFailed, Json, Stats, Stopwatch
from baton.cli.chat_session import Conversation
from baton.cli.exit_codes import EXIT_CONFIG, EXIT_FAILED, report_error
from baton.cli.running_serve import find_serve, port_option, status_of
from baton.topology.instances import running_instances

DEFAULT_URL = "http://127.0.0.1:8000"
COMMANDS = """\
/image FILE   send an image with the next message
/system TEXT  set the system prompt; without TEXT, remove it
/stats        show the figures of the last answer
/clear        forget the conversation
/help         show this
/quit         leave, as Ctrl-D does. Ctrl-C stops an answer"""


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--url", help="URL of an OpenAI endpoint; by default that of the running `baton serve`")
@click.option(
    "--api-key", envvar=["BATON_API_KEY", "OPENAI_API_KEY"], help="API key; found for a `baton serve` of yours"
)
@click.option("--model", help="name of the model; by default the first that is served")
@click.option("--system", default="", help="system prompt")
@click.option("--image", "images", multiple=True, help="image to send with the first message; can be repeated")
@click.option("--max-tokens", type=click.IntRange(1), help="longest answer, in tokens")
@click.option("--temperature", type=click.FloatRange(0), help="randomness; 0 always takes the likeliest token")
@click.option("--stats", "show_stats", is_flag=True, help="show the figures of every answer, on standard error")
@click.option("--timeout-s", type=click.FloatRange(0.1), default=600.0, show_default=True, help="longest silence")
@port_option
def chat(
    prompt: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    model: str | None,
    system: str,
    images: tuple[str, ...],
    max_tokens: int | None,
    temperature: float | None,
    show_stats: bool,
    timeout_s: float,
    port: int | None,
) -> None:
    """Talk to a running server: `baton chat`, `baton chat "What is KV?"`, `cat file | baton chat "Summarize:"`.

    With a PROMPT or piped input it answers once and exits; what is piped follows the PROMPT. Otherwise it is a
    conversation; /help lists its commands.
    """
    options: Json = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        client = _connect(url, api_key, timeout_s, port)
        conversation = Conversation(model or _first_model(client), system, given)
        for image in images:
            conversation.attach(image)
    except (OSError, ValueError) as error:
        sys.exit(report_error(f"cannot read the image: {error}", EXIT_CONFIG))
    except ChatFailed as error:
        sys.exit(report_error(str(error), EXIT_FAILED))
    sys.exit(_talk(ChatTerminal(client, conversation, show_stats), " ".join(prompt)))


def _talk(terminal: "ChatTerminal", prompt: str) -> int:
    """Answer the prompt and what is piped, or begin a conversation; return the exit code."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    if text := "\n".join(filter(None, (prompt, piped))):
        return 0 if terminal.answer(text) else EXIT_FAILED
    if not sys.stdin.isatty():
        return report_error("there is no question: standard input is empty", EXIT_CONFIG)
    terminal.run()
    return 0


def _connect(url: str | None, key: str | None, timeout_s: float, port: int | None) -> ChatClient:
    """Return a client of the endpoint with that URL, or of the running `baton serve`."""
    if url is not None or (port is None and not running_instances()):
        return ChatClient(url or DEFAULT_URL, key, timeout_s, own=False)
    status = status_of(find_serve(port))
    own = status.url.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
    return ChatClient(own, key or status.api_key, timeout_s, own=True)


def _first_model(client: ChatClient) -> str:
    models = client.models()
    if not models:
        raise ChatFailed(f"{client.url} serves no model at the moment: `baton logs` says why")
    return models[0]


class ChatTerminal:
    """Prints answers as they arrive, and reads messages and commands from the keyboard."""

    def __init__(self, client: ChatClient, conversation: Conversation, show_stats: bool) -> None:
        self._client = client
        self._conversation = conversation
        self._show_stats = show_stats
        self._last: Stats | None = None

    def run(self) -> None:
        """Talk until Ctrl-D or /quit."""
        with suppress(ImportError):
            import readline  # noqa: F401 - editing and history for input()
        click.echo(f"{self._conversation.model} at {self._client.url}. /help lists the commands.")
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\n(/quit or Ctrl-D to leave)")
                continue
            if text in ("/quit", "/exit"):
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.answer(text)

    def answer(self, text: str) -> bool:
        """Ask, and print the answer as it arrives; Ctrl-C stops it. Return whether there was an answer."""
        watch, parts = Stopwatch(), []
        try:
            with closing(self._client.stream(self._conversation.request(text))) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    watch.add(piece)
                    parts.append(piece.text)
                    _show(piece.text, piece.reasoning)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo(click.style(" (stopped)", dim=True), nl=False)
        except ChatFailed as error:
            _end_line(parts)
            report_error(str(error), EXIT_FAILED)
            return False
        _end_line(parts)
        self._last = watch.stats()
        self._conversation.add(text, "".join(parts))
        if self._show_stats:
            click.echo(str(self._last), err=True)
        return True

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/image":
                self._attach(argument)
            case "/system":
                self._conversation.system = argument
                click.echo("system prompt set" if argument else "system prompt removed")
            case "/stats":
                click.echo(str(self._last) if self._last is not None else "no answer yet")
            case "/clear":
                self._conversation.clear()
                click.echo("conversation cleared")
            case "/help":
                click.echo(COMMANDS)
            case _:
                click.echo(f"no command {name}; the commands are:\n{COMMANDS}")

    def _attach(self, path: str) -> None:
        if not path:
            click.echo("give a file: /image FILE")
            return
        try:
            self._conversation.attach(path)
        except (OSError, ValueError) as error:
            click.echo(f"cannot read the image: {error}")
            return
        click.echo(f"{self._conversation.pending_images} image(s) go with the next message")


def _show(text: str, reasoning: str) -> None:
    """Print a part of the answer; reasoning on a terminal only."""
    if reasoning and sys.stdout.isatty():
        click.echo(click.style(reasoning, dim=True), nl=False)
    if text:
        click.echo(text, nl=False)
    sys.stdout.flush()


def _end_line(parts: list[str]) -> None:
    if not "".join(parts).endswith("\n"):
        click.echo()
    sys.stdout.flush()
