"""Stop strings on streamed text: text that may begin a stop string is held back until that is decided. Pure."""


class StopMatcher:
    """Matches stop strings in the text of one choice."""

    __slots__ = ("_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=1)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text to send now. Sets `stopped` when a stop string is complete; the stop string is not sent."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            _, place = min(found)  # the first to be complete, as if the text had arrived letter by letter
            return text[:place]
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _possible_prefix(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
