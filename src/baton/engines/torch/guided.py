"""Grammars that hold an answer to a shape: compiled by llguidance on threads of their own, followed token by token.

A grammar comes from a stranger. Its size, its rules and its references are counted before the library sees it, the
library's own fuel bounds the rest, and the threads that compile have stacks deep enough for what passes the counts.
"""

import contextlib
import json
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from baton.engines.torch.sampling_params import Guide
from baton.errors import BatonError, EngineDead, InvalidRequest, Unsupported
from baton.protocol.requests import GuidedDecoding

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GuideFactory = Callable[[], Guide]

MAX_SCHEMA_BYTES = 256 * 1024
MAX_CHOICE_BYTES = 256 * 1024
MAX_REGEX_BYTES = 16 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024
MAX_REFERENCES = 1000
MAX_RULES = 500
CACHED_GRAMMARS = 32

_THREADS = 2
# Virtual: a page is real only once the library has recursed into it.
_STACK_BYTES = 256 * 1024 * 1024
# Unbounded white space is where a small model likes to stay for good.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_BACKENDS = (None, "auto", "guidance", "llguidance")
_REHEARSED_TOKENS = 8
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_END = "<|baton:end of grammar|>"


class _Vocabulary(NamedTuple):
    """The tokenizer as the library wants it, and which tokens a grammar may ever use, as a bit set."""

    tokenizer: "LLTokenizer"
    usable: int
    mask_bytes: int


class GuideCompiler:
    """Turns what requests ask for into guides. `compile` and `close` are called from any thread and do not block.

    - `json`: a JSON schema, as an object or as JSON text; `true` or `{}` is any JSON object.
    - `regex`: a whole-match pattern in the syntax of Rust's regex crate: no look-around, no back-references.
    - `choice`: one of some texts.
    - `grammar`: GBNF as in llama.cpp (`root ::= ...`), or Lark as llguidance extends it (`start: ...`).

    An end token of `eos` may follow exactly where the grammar may end. No other special token is ever allowed, even if
    a grammar names it, and none that only pads the model's vocabulary.
    """

    def __init__(self, tokenizer_dir: Path, vocab: int, eos: tuple[int, ...]) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._vocab = vocab
        self._eos = eos
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._cache: OrderedDict[bytes, Future[GuideFactory]] = OrderedDict()
        self._closed = False

    def compile(self, guided: GuidedDecoding) -> Future[GuideFactory]:
        """Return what will make fresh guides for `guided`; equal requests are compiled once.

        The future is the caller's own: cancelling it harms no other. It fails with InvalidRequest naming the field,
        with Unsupported for what this engine cannot guide, or with EngineDead after `close`.
        """
        mine: Future[GuideFactory] = Future()
        try:
            key = msgspec.json.encode(guided)
        except (TypeError, ValueError, RecursionError) as error:
            mine.set_exception(InvalidRequest(f"guided_decoding: {error}"))
            return mine
        with self._lock:
            if self._closed:
                mine.set_exception(EngineDead("the engine has stopped"))
                return mine
            shared = self._cache.get(key)
            if shared is None:
                shared = Future()
                self._start(key, guided, shared)
                self._cache[key] = shared
            self._cache.move_to_end(key)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        shared.add_done_callback(lambda done: _hand_on(done, mine))
        return mine

    def close(self) -> None:
        """Fail what has not been compiled and let the threads go. Guides that exist go on. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = list(self._cache.values())
            self._cache.clear()
            for _ in range(self._threads):
                self._jobs.put(None)
        for future in waiting:
            _settle(future, EngineDead("the engine has stopped"))

    def _start(self, key: bytes, guided: GuidedDecoding, shared: Future[GuideFactory]) -> None:
        """Queue a compilation. Threads start with the first ones, and end with the process whatever they do."""

        def job() -> None:
            _settle(shared, EngineDead("the engine has stopped") if self._closed else self._attempt(key, guided))

        if self._threads < _THREADS:
            with _deep_stacks():
                threading.Thread(target=_work, args=(self._jobs,), name="guides", daemon=True).start()
            self._threads += 1
        self._jobs.put(job)

    def _attempt(self, key: bytes, guided: GuidedDecoding) -> GuideFactory | BatonError:
        try:
            return self._build(guided)
        except BatonError as error:
            problem = error
        except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception; this thread has no other caller)
            problem = InvalidRequest(f"guided_decoding.{'+'.join(guided.kinds())}: {_brief(str(error))}")
        with self._lock:
            self._cache.pop(key, None)  # a grammar that failed is not worth its place
        return problem

    def _build(self, guided: GuidedDecoding) -> GuideFactory:
        kind = _only_kind(guided)
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise Unsupported(f"guided_decoding: llguidance is not installed ({error})") from None
        grammar = _grammar(guided, kind)
        vocabulary = self._read_vocabulary()
        # A step may burn fuel for some 10 ms; the states of one grammar may fill some 100 MB.
        limits = LLParserLimits(
            initial_lexer_fuel=300_000,
            step_lexer_fuel=100_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        template = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if template.is_error():
            raise InvalidRequest(f"guided_decoding.{kind}: {_brief(template.get_error())}")
        copying = threading.Lock()

        def make() -> Guide:
            with copying:
                return _Follower(template.deep_copy(), vocabulary, kind)

        _rehearse(make())
        return make

    def _read_vocabulary(self) -> _Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(self._tokenizer_dir, self._vocab, self._eos)
            return self._vocabulary


class _Follower:
    """A Guide (see `plan.py`): one walk through a grammar."""

    __slots__ = ("_kind", "_matcher", "_vocabulary")

    def __init__(self, matcher: "LLMatcher", vocabulary: _Vocabulary, kind: str) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._kind = kind

    @property
    def done(self) -> bool:
        """See `Guide.done`."""
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        """See `Guide.mask`."""
        allowed = int.from_bytes(self._matcher.compute_bitmask(), "little") & self._vocabulary.usable
        if self._matcher.is_error():
            raise self._problem()
        if not allowed:
            raise InvalidRequest(f"guided_decoding.{self._kind}: no token of this model can follow")
        return allowed.to_bytes(self._vocabulary.mask_bytes, "little")

    def accept(self, token: int) -> None:
        """See `Guide.accept`."""
        if not self._matcher.consume_token(token):
            raise self._problem()

    def _problem(self) -> InvalidRequest:
        return InvalidRequest(f"guided_decoding.{self._kind}: cannot go on: {_brief(self._matcher.get_error())}")


def _only_kind(guided: GuidedDecoding) -> str:
    kinds = guided.kinds()
    if len(kinds) != 1:
        raise InvalidRequest(f"guided_decoding: one shape is needed, not {', '.join(kinds) or 'none'}")
    if kinds[0] == "structural_tag":
        raise Unsupported("guided_decoding.structural_tag: this engine cannot guide its output by tags")
    if guided.backend not in _BACKENDS:
        raise Unsupported(f"guided_decoding.backend: {guided.backend[:32]!r} is not in this engine; leave it out")
    return kinds[0]


def _grammar(guided: GuidedDecoding, kind: str) -> str:
    """Return the library's words for what is asked, after checks that cost little."""
    from llguidance import LLMatcher

    match kind:
        case "json":
            schema = _schema_text(guided.json)
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": guided.whitespace_pattern or _WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(_bounded(kind, guided.regex or "", MAX_REGEX_BYTES))
        case "choice":
            if not guided.choice:
                raise InvalidRequest("guided_decoding.choice: there is nothing to choose from")
            pattern = _bounded(kind, "|".join(map(re.escape, guided.choice)), MAX_CHOICE_BYTES)
            return LLMatcher.grammar_from_regex(f"(?:{pattern})")
        case _:
            return _lark(_bounded(kind, guided.grammar or "", MAX_GRAMMAR_BYTES))


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(_bounded("json", schema, MAX_SCHEMA_BYTES))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"guided_decoding.json: not JSON: {error}") from None
    if schema is True or schema == {}:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest("guided_decoding.json: a schema is an object, or true for any JSON object")
    text = _bounded("json", msgspec.json.encode(schema).decode(), MAX_SCHEMA_BYTES)
    _count("json", "references", text.count('"$ref"'), MAX_REFERENCES)
    return text


def _lark(grammar: str) -> str:
    """Return a GBNF grammar as Lark, and a Lark grammar as it is, in the library's wrapping."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    rules = max(grammar.count("::="), sum(":" in line for line in grammar.splitlines()))
    _count("grammar", "rules", rules, MAX_RULES)
    _count("grammar", "references", grammar.count('"$ref"'), MAX_REFERENCES)
    try:
        lark = gbnf_to_lark(grammar) if _GBNF_RULE.search(grammar) else grammar
    except Exception as error:  # noqa: BLE001 (the converter raises plain Exception, IndexError, RecursionError)
        raise InvalidRequest(f"guided_decoding.grammar: {_brief(str(error))}") from None
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _bounded(kind: str, text: str, most: int) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"guided_decoding.{kind}: not text: {error.reason}") from None
    if size > most:
        raise InvalidRequest(f"guided_decoding.{kind}: {size} bytes; at most {most} are taken")
    return text


def _count(kind: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"guided_decoding.{kind}: {count} {what}; at most {most} are taken")


def _rehearse(guide: Guide) -> None:
    """Walk a few tokens in, so that a grammar that starts with too much work is refused here and not in a step."""
    for step in range(_REHEARSED_TOKENS):
        if guide.done:
            return
        allowed = int.from_bytes(guide.mask(), "little")
        lowest, highest = (allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1
        guide.accept(highest if step % 2 == 0 else lowest)


def _read_vocabulary(directory: Path, vocab: int, eos: tuple[int, ...]) -> _Vocabulary:
    """Read the tokenizer. One token is added to it: the end, for models without one; it is never usable."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:
        raise Unsupported(f"guided_decoding: cannot read {directory / 'tokenizer.json'}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ends = [token for token in eos if token in known and token < vocab]
    bits = bytearray((vocab + 7) // 8)
    for token in (known - special) | set(ends):
        if token < vocab:
            bits[token // 8] |= 1 << token % 8
    if not ends:
        tokenizer.add_special_tokens([_END])
        ends = [token for token in (tokenizer.token_to_id(_END),) if token is not None]
    size = max(vocab, *known, *ends) + 1
    wrapped = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
    return _Vocabulary(wrapped, int.from_bytes(bits, "little"), len(bits))


def _brief(message: str) -> str:
    """Return the first lines of a message of the library, which may quote the whole grammar."""
    lines = " ".join(line.strip() for line in message.splitlines() if line.strip() and line != "<non-verbose/>")
    return lines if len(lines) <= 300 else f"{lines[:300]}..."


def _settle(future: Future[GuideFactory], result: GuideFactory | BatonError) -> None:
    """Set the result unless `close`, or the thread that it overtook, has set one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BatonError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _hand_on(done: Future[GuideFactory], mine: Future[GuideFactory]) -> None:
    if not mine.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is not None:
        mine.set_exception(error)
    else:
        mine.set_result(done.result())


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Give threads that start meanwhile a deep stack; the setting is the process's, and goes back at once."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
