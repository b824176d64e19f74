"""What a request asks to know of its own prompt: its text, its token ids, its log-probabilities."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from baton.errors import Unsupported
from baton.ports.engine import Work
from baton.ports.tokenizer import TokenTexts
from baton.protocol.outputs import (
    Chunk,
    FinishReason,
    Logprobs,
    Output,
    PromptData,
    PromptLogprobs,
    PromptScored,
    Usage,
)
from baton.protocol.requests import GenerateRequest, OutputOptions
from baton.request.tracker import TrackedRequest


class PromptReport:
    """Builds the chunk about the prompt of one request, while it is `pending`: it is sent once, before the tokens."""

    __slots__ = ("_texts", "_work", "pending")

    def __init__(self, work: Work, texts: TokenTexts | None) -> None:
        output = work.output
        self._work = work
        self._texts = texts
        self.pending = bool(output.echo or output.return_token_ids or output.prompt_logprobs is not None)

    async def take(self, outputs: Sequence[Output], tracked: TrackedRequest) -> list[Chunk]:
        """Return the chunk to send before those of `outputs`, if there is one. Raises Unsupported without a tokenizer.

        It is built in a thread: a prompt may have tens of thousands of log-probabilities.
        """
        if not outputs:
            return []
        scores = next((output.logprobs for output in outputs if isinstance(output, PromptScored)), None)
        work = self._work
        if scores is None and work.output.prompt_logprobs is not None:
            return []
        self.pending = False
        data = await tracked.scope.wait(
            asyncio.to_thread(_prompt_data, work.token_ids, work.output, scores, self._texts)
        )
        return [Chunk([], prompt=data)]


async def no_tokens(
    request: GenerateRequest, texts: TokenTexts | None, tracked: TrackedRequest
) -> AsyncGenerator[Chunk, None]:
    """Yield the answer to a request for no tokens and no log-probabilities, which needs no engine.

    The frontend sends such a request too when it moves one whose last token was generated elsewhere.
    """
    output = request.output
    if output.echo or output.return_token_ids:
        data = await tracked.scope.wait(asyncio.to_thread(_prompt_data, request.token_ids, output, None, texts))
        yield Chunk([], prompt=data)
    yield Chunk([], finish_reason=FinishReason.LENGTH, usage=Usage(tracked.prompt_tokens, 0))


def without_tokens(chunk: Chunk) -> Chunk:
    """Return a chunk of a request that was only to score its prompt, without the token that the engine generated."""
    usage = None if chunk.usage is None else msgspec.structs.replace(chunk.usage, completion_tokens=0)
    reason = None if chunk.finish_reason is None else FinishReason.LENGTH
    return msgspec.structs.replace(
        chunk, token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None, usage=usage
    )


def _prompt_data(
    prompt: Sequence[int], output: OutputOptions, scores: Logprobs | None, texts: TokenTexts | None
) -> PromptData:
    token_ids = list(prompt)
    text, tokens, offsets = None, None, None
    if output.echo:
        if texts is None:
            raise Unsupported("echo: this worker has no tokenizer")
        text, offsets = texts.decode(token_ids)
        tokens = [texts.text_of(token) for token in token_ids]
    return PromptData(
        token_ids=token_ids if output.echo or output.return_token_ids else None,
        text=text,
        tokens=tokens,
        offsets=offsets,
        logprobs=None if scores is None else _by_token(prompt, scores, texts),
    )


def _by_token(prompt: Sequence[int], logprobs: Logprobs, texts: TokenTexts | None) -> PromptLogprobs:
    """Return one entry for each token of the prompt: None for the first, else its log-probability and alternatives."""
    entries: PromptLogprobs = [None]
    for number, (token, chosen) in enumerate(zip(prompt[1:], logprobs.chosen, strict=True)):
        entry: dict[str, dict[str, object]] = {str(token): {"logprob": chosen, "rank": None}}
        for top in logprobs.top[number] if logprobs.top else ():
            entry.setdefault(str(top.token_id), {"logprob": top.logprob})["rank"] = top.rank
        if texts is not None:
            for token_id, value in entry.items():
                value["decoded_token"] = texts.text_of(int(token_id))
        entries.append(entry)
    return entries
