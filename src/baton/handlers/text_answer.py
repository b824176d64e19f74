"""The answer to a request in text format: the tokens of its choices become chunks of text, with stop strings matched.

One per request; it holds everything that one answer has and another has not.
"""

import time
from functools import partial

from baton.handlers.stop_strings import StopMatcher
from baton.ports.runtime import Context
from baton.ports.tokenizer import Tokenizer, TokenTexts
from baton.protocol.outputs import Chunk, FinishReason, Logprobs, Usage
from baton.protocol.text import TextChunk, TextLogprob, TextRequest
from baton.request.tracker import TrackedRequest


class TextAnswer:
    """The text of every choice so far. `texts` is needed for log-probabilities only."""

    def __init__(
        self, request: TextRequest, context: Context, tokenizer: Tokenizer, texts: TokenTexts | None = None
    ) -> None:
        chat = request.messages is not None
        self._wants_usage = request.wants_usage
        self._chunk = partial(
            TextChunk,
            request_id=("chatcmpl-" if chat else "cmpl-") + context.id,
            model=request.model,
            created=int(time.time()),
            chat=chat,
        )
        self._choices = [_Choice(request, tokenizer, texts) for _ in range(request.n or 1)]
        self._open = len(self._choices)
        self._generating = len(self._choices)
        self.tokens = 0

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    @property
    def is_generated(self) -> bool:
        """Whether the worker has ended every choice: a stop string ends one before the worker does."""
        return not self._generating

    def push(self, chunk: Chunk, tracked: TrackedRequest) -> list[TextChunk]:
        """Return the text chunks to send after `chunk`."""
        choice = self._choices[chunk.index]
        if chunk.finish_reason is not None:
            self._generating -= 1
        if choice.ended:
            return []
        self.tokens += choice.take(chunk.token_ids, chunk.logprobs)
        reason = FinishReason.STOP if choice.stopped else chunk.finish_reason
        if reason is not None:
            choice.ended = True
            self._open -= 1
        elif not choice.has_text:
            return []
        first, text, logprobs = choice.next(flush=reason is not None)
        chunks = [self._chunk(text=text, index=chunk.index, first=first, finish_reason=reason, logprobs=logprobs)]
        if self.complete and self._wants_usage:
            usage = Usage(tracked.prompt_tokens, self.tokens, tracked.cached_tokens)
            chunks.append(self._chunk(text="", usage=usage))
        return chunks


class _Choice:
    """One choice: its decoder, its stop strings, and what has not been sent."""

    __slots__ = ("_begun", "_decoder", "_length", "_logprobs", "_stops", "_text", "_texts", "ended")

    def __init__(self, request: TextRequest, tokenizer: Tokenizer, texts: TokenTexts | None) -> None:
        self._decoder = tokenizer.decoder()
        self._stops = StopMatcher(request.stops)
        self._texts = texts
        self._text = ""
        self._length = 0
        self._logprobs: list[TextLogprob] = []
        self._begun = False
        self.ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.stopped

    @property
    def has_text(self) -> bool:
        """Whether there is text to send."""
        return bool(self._text)

    def take(self, token_ids: list[int], logprobs: Logprobs | None) -> int:
        """Add tokens; return how many. Tokens after a stop string are neither sent nor counted."""
        for number, token in enumerate(token_ids):
            if logprobs is not None and self._texts is not None:
                self._logprobs.append(_logprob(self._texts, token, logprobs, number, self._length))
            new = self._decoder.push((token,))
            self._length += len(new)
            self._text += self._stops.push(new)
            if self._stops.stopped:
                return number + 1
        return len(token_ids)

    def next(self, flush: bool) -> tuple[bool, str, tuple[TextLogprob, ...] | None]:
        """Return whether it is the first chunk of the choice, its text and its log-probabilities."""
        first, self._begun = not self._begun, True
        text, self._text = self._text + (self._rest() if flush else ""), ""
        logprobs, self._logprobs = tuple(self._logprobs), []
        return first, text, logprobs or None

    def _rest(self) -> str:
        """Return what is left at the end: a character that is not complete, and text that began like a stop string."""
        if self._stops.stopped:
            return ""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()


def _logprob(texts: TokenTexts, token: int, logprobs: Logprobs, number: int, offset: int) -> TextLogprob:
    """Return the entry of a token. As the frontend does it, a special token that was generated has no text."""
    top = logprobs.top[number] if number < len(logprobs.top) else ()
    alternatives = tuple(TextLogprob(texts.text_of(each.token_id), each.logprob, each.token_id) for each in top)
    text = "" if texts.is_special(token) else texts.text_of(token)
    return TextLogprob(text, logprobs.chosen[number], token, offset, alternatives)
