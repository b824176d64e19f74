"""Stop strings on growing text: what may be the beginning of one is held back until it is clear. Pure."""


class StopMatcher:
    """Watches the text of one choice."""

    __slots__ = ("_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=1)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that can be shown now. Sets `stopped` when a stop string is complete; it is not shown."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            _, place = min(found)  # the first to be complete, as if the text had come letter by letter
            return text[:place]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
