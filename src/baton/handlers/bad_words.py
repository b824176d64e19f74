"""Words that an answer must not contain, as the sequences of tokens that spell them."""

import asyncio
from collections.abc import Sequence

import msgspec

from baton.errors import InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.ports.tokenizer import TokenTexts
from baton.request.tracker import TrackedRequest

MAX_BAD_WORDS = 1024
MAX_CHARS = 256


async def with_bad_words(work: Work, texts: TokenTexts | None, tracked: TrackedRequest) -> Work:
    """Return `work` with the tokens of its bad words. Raises InvalidRequest, or Unsupported without a tokenizer."""
    words = work.sampling.bad_words
    if not words:
        return work
    if len(words) > MAX_BAD_WORDS or any(not word.strip() or len(word) > MAX_CHARS for word in words):
        raise InvalidRequest(f"bad_words: at most {MAX_BAD_WORDS} words of 1 to {MAX_CHARS} characters are accepted")
    if texts is None:
        raise Unsupported("bad_words: this worker has no tokenizer")
    found = await tracked.scope.wait(asyncio.to_thread(_spellings, words, texts))
    return msgspec.structs.replace(work, bad_words=found)


def _spellings(words: Sequence[str], texts: TokenTexts) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the start of a text and after a space."""
    spelled = (tuple(texts.encode(text)) for word in words for text in (word.lstrip(), " " + word.lstrip()))
    return tuple(dict.fromkeys(filter(None, spelled)))
