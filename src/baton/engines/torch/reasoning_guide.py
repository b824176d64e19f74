"""A guide that begins when the model has reasoned."""

from baton.engines.torch.sampling_params import Guide


class ReasoningGuide:
    """A Guide (see `sampling_params.py`) that allows every token up to `end_token`, and then follows another guide."""

    __slots__ = ("_end_token", "_every_token", "_guide", "_reasons")

    def __init__(self, guide: Guide, end_token: int, vocab: int) -> None:
        self._guide = guide
        self._end_token = end_token
        self._every_token = ((1 << vocab) - 1).to_bytes((vocab + 7) // 8, "little")
        self._reasons = True

    @property
    def done(self) -> bool:
        """See `Guide.done`."""
        return not self._reasons and self._guide.done

    def mask(self) -> bytes:
        """See `Guide.mask`."""
        return self._every_token if self._reasons else self._guide.mask()

    def accept(self, token: int) -> None:
        """See `Guide.accept`."""
        if not self._reasons:
            self._guide.accept(token)
        elif token == self._end_token:
            self._reasons = False
