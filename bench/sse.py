"""Counts the content events of a streamed chat completion in raw socket reads, without parsing them.

The load generator shares two cores with what it measures, so a read costs it one scan. The scan relies on
compact JSON (`"content":"` with no space), which every system under test writes.
"""

import re
from collections import deque

CONTENT = b'"content":"'
END_OF_BODY = b"\r\n0\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
# A marker cut in two by a read is found by looking again at one byte less than the longest marker.
OVERLAP = max(len(CONTENT), len(END_OF_BODY)) - 1
# The usage event, `[DONE]` and the end of the body may each arrive in a read of their own.
READS_KEPT = 6


class ResponseScanner:
    """One HTTP/1.1 chunked response, fed read by read; `complete` turns true with its last byte."""

    __slots__ = ("_recent", "_tail", "complete", "events", "status")

    def __init__(self) -> None:
        self.status = 0
        self.events = 0
        self.complete = False
        self._tail = b""
        self._recent: deque[bytes] = deque(maxlen=READS_KEPT)

    def feed(self, data: bytes) -> int:
        """Take one read and return how many content events it completed the marker of."""
        window = self._tail + data
        if not self.status:
            match = STATUS.match(window)
            if match is None:
                self._tail = window
                return 0
            self.status = int(match[1])
        # Cutting at the overlap keeps less than one marker, so no event is counted twice.
        new = window.count(CONTENT)
        self._tail = window[-OVERLAP:]
        self._recent.append(data)
        self.events += new
        self.complete = window.endswith(END_OF_BODY)
        return new

    def completion_tokens(self) -> int | None:
        """The token count the server reports in its usage event, or None when it sent none."""
        match = COMPLETION_TOKENS.search(b"".join(self._recent))
        return int(match[1]) if match else None
