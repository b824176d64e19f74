"""Guided decoding: llguidance compiles grammars on threads of their own and matches them token by token.

A grammar is untrusted input. Its size, rules and references are limited before the library parses it, the library's own
limits bound the rest, and the compiling threads have stacks deep enough for what passes.
"""

import contextlib
import json
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from baton.engines.torch.json_schema import explained, with_closed_objects, without_unknown_formats
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
# Virtual: a page is allocated only when the library recurses into it.
_STACK_BYTES = 256 * 1024 * 1024
# A small model tends to generate white space without end if it may.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_BACKENDS = (None, "auto", "guidance", "llguidance")
_DRY_RUN_TOKENS = 8
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_END = "<|baton:end of grammar|>"


class _Vocabulary(NamedTuple):
    """The tokenizer for the library, and the tokens that a grammar may use, as a bit set."""

    tokenizer: "LLTokenizer"
    usable: int
    mask_bytes: int


class GuideCompiler:
    """Compiles the grammars of requests. `compile` and `close` are called from any thread and do not block.

    - `json`: a JSON schema, as an object or as JSON text; `true` or `{}` is any JSON object. An object has only the
      properties that the schema declares, unless it has `additionalProperties`.
    - `regex`: a whole-match pattern in the syntax of Rust's regex crate: no look-around, no back-references.
    - `choice`: one of several texts.
    - `grammar`: GBNF as in llama.cpp (`root ::= ...`), or Lark as llguidance extends it (`start: ...`).

    An end token of `eos` is allowed exactly where the grammar may end. No other special token is allowed, even if a
    grammar names it, and no token that only pads the vocabulary.
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
        """Return a future factory of guides for `guided`; equal requests are compiled once.

        Each caller has its own future and may cancel it. It fails with InvalidRequest naming the field, with
        Unsupported for what this engine cannot guide, or with EngineDead after `close`.
        """
        result: Future[GuideFactory] = Future()
        try:
            key = msgspec.json.encode(guided)
        except (TypeError, ValueError, RecursionError) as error:
            result.set_exception(InvalidRequest(f"guided_decoding: {error}"))
            return result
        with self._lock:
            if self._closed:
                result.set_exception(EngineDead("the engine has stopped"))
                return result
            shared = self._cache.get(key)
            if shared is None:
                shared = Future()
                self._start(key, guided, shared)
                self._cache[key] = shared
            self._cache.move_to_end(key)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        shared.add_done_callback(lambda done: _copy_result(done, result))
        return result

    def close(self) -> None:
        """Fail pending compilations and end the threads. Existing guides stay usable. Idempotent."""
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
        """Queue a compilation. Threads start on demand and do not keep the process alive."""

        def job() -> None:
            _settle(shared, EngineDead("the engine has stopped") if self._closed else self._attempt(key, guided))

        if self._threads < _THREADS:
            with _deep_stacks():
                threading.Thread(target=_run_jobs, args=(self._jobs,), name="guides", daemon=True).start()
            self._threads += 1
        self._jobs.put(job)

    def _attempt(self, key: bytes, guided: GuidedDecoding) -> GuideFactory | BatonError:
        try:
            return self._build(guided)
        except BatonError as error:
            problem = error
        except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
            problem = InvalidRequest(f"guided_decoding.{'+'.join(guided.kinds())}: {_brief(str(error))}")
        with self._lock:
            self._cache.pop(key, None)  # only compiled grammars stay cached
        return problem

    def _build(self, guided: GuidedDecoding) -> GuideFactory:
        kind = _only_kind(guided)
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise Unsupported(f"guided_decoding: llguidance is not installed ({error})") from None
        grammar = _grammar(guided, kind)
        vocabulary = self._read_vocabulary()
        # About 10 ms of work per step, and 100 MB for the states of one grammar.
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
            raise InvalidRequest(f"guided_decoding.{kind}: {explained(_brief(template.get_error()))}")
        copying = threading.Lock()

        def make() -> Guide:
            with copying:
                return _GrammarMatcher(template.deep_copy(), vocabulary, kind)

        _dry_run(make())
        return make

    def _read_vocabulary(self) -> _Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(self._tokenizer_dir, self._vocab, self._eos)
            return self._vocabulary


class _GrammarMatcher:
    """A Guide (see `sampling_params.py`): one sequence in one grammar."""

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
        return InvalidRequest(f"guided_decoding.{self._kind}: cannot continue: {_brief(self._matcher.get_error())}")


def _only_kind(guided: GuidedDecoding) -> str:
    kinds = guided.kinds()
    if len(kinds) != 1:
        raise InvalidRequest(f"guided_decoding: exactly one kind is needed, not {', '.join(kinds) or 'none'}")
    if kinds[0] == "structural_tag":
        raise Unsupported("guided_decoding.structural_tag: this engine does not support structural tags")
    if guided.backend not in _BACKENDS:
        raise Unsupported(f"guided_decoding.backend: {guided.backend[:32]!r} is not in this engine; leave it out")
    if guided.whitespace_pattern is not None and kinds[0] != "json":
        raise InvalidRequest(f"guided_decoding.whitespace_pattern: it applies to json, not to {kinds[0]}")
    return kinds[0]


def _grammar(guided: GuidedDecoding, kind: str) -> str:
    """Return the library's grammar for `guided`, after cheap checks."""
    from llguidance import LLMatcher

    match kind:
        case "json":
            whitespace = _WHITESPACE if guided.whitespace_pattern is None else guided.whitespace_pattern
            return LLMatcher.grammar_from_json_schema(
                _schema_text(guided.json), overrides={"whitespace_pattern": whitespace}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(_bounded(kind, guided.regex or "", MAX_REGEX_BYTES))
        case "choice":
            if not guided.choice:
                raise InvalidRequest("guided_decoding.choice: the list is empty")
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
    known = without_unknown_formats(schema)
    text = _bounded("json", msgspec.json.encode(known).decode(), MAX_SCHEMA_BYTES)
    _limit("json", "references", text.count('"$ref"'), MAX_REFERENCES)
    return msgspec.json.encode(with_closed_objects(known)).decode()


def _lark(grammar: str) -> str:
    """Return a GBNF or Lark grammar in the library's JSON form."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    rules = max(grammar.count("::="), sum(":" in line for line in grammar.splitlines()))
    _limit("grammar", "rules", rules, MAX_RULES)
    _limit("grammar", "references", grammar.count('"$ref"'), MAX_REFERENCES)
    try:
        lark = gbnf_to_lark(grammar) if _GBNF_RULE.search(grammar) else grammar
    except Exception as error:  # noqa: BLE001 (the converter raises plain Exception, IndexError, RecursionError)
        raise InvalidRequest(f"guided_decoding.grammar: {_brief(str(error))}") from None
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _bounded(kind: str, text: str, max_bytes: int) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"guided_decoding.{kind}: not text: {error.reason}") from None
    if size > max_bytes:
        raise InvalidRequest(f"guided_decoding.{kind}: {size} bytes; at most {max_bytes} are accepted")
    return text


def _limit(kind: str, noun: str, count: int, max_count: int) -> None:
    if count > max_count:
        raise InvalidRequest(f"guided_decoding.{kind}: {count} {noun}; at most {max_count} are accepted")


def _dry_run(guide: Guide) -> None:
    """Match a few tokens, so that a grammar with an expensive start is refused here and not in a step."""
    for step in range(_DRY_RUN_TOKENS):
        if guide.done:
            return
        allowed = int.from_bytes(guide.mask(), "little")
        lowest, highest = (allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1
        guide.accept(highest if step % 2 == 0 else lowest)


def _read_vocabulary(directory: Path, vocab: int, eos: tuple[int, ...]) -> _Vocabulary:
    """Read the tokenizer. For models without an end token one is added, which is never usable."""
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
    bits = _bit_set((known - special) | set(ends), vocab)
    if not ends:
        tokenizer.add_special_tokens([_END])
        ends = [token for token in (tokenizer.token_to_id(_END),) if token is not None]
    size = max(vocab, *known, *ends) + 1
    wrapped = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
    return _Vocabulary(wrapped, int.from_bytes(bits, "little"), len(bits))


def _bit_set(tokens: Iterable[int], vocab: int) -> bytearray:
    bits = bytearray((vocab + 7) // 8)
    for token in tokens:
        if token < vocab:
            bits[token // 8] |= 1 << token % 8
    return bits


def _brief(message: str) -> str:
    """Return the start of a message of the library, which may quote the whole grammar."""
    lines = " ".join(line.strip() for line in message.splitlines() if line.strip() and line != "<non-verbose/>")
    return lines if len(lines) <= 300 else f"{lines[:300]}..."


def _settle(future: Future[GuideFactory], result: GuideFactory | BatonError) -> None:
    """Set the result unless `close` or a compiling thread has set one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BatonError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _copy_result(done: Future[GuideFactory], result: Future[GuideFactory]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


def _run_jobs(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Give threads that start in this block a deep stack; the setting is process-wide and restored at once."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
