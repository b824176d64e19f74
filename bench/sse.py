"""Counts the content events of a streamed chat completion in raw socket reads, without parsing them.

The load generator shares two cores with the measured systems, so it scans each read only once. The scan relies on
compact JSON (`"content":"` with no space), which every system under test writes.
"""

import re
from collections import deque

CONTENT = b'"content":"'
END_OF_BODY = b"\r\n0\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
# Each scan starts one byte less than the longest marker before the read, to find a marker split between two reads.
OVERLAP = max(len(CONTENT), len(END_OF_BODY)) - 1
# The usage event, `[DONE]` and the end of the body may each arrive in a separate read.
READS_KEPT = 6


class ResponseScanner:
    """One HTTP/1.1 chunked response, fed read by read; `complete` is true after its last byte."""

    __slots__ = ("_recent", "_tail", "complete", "events", "status")

    def __init__(self) -> None:
        self.status = 0
        self.events = 0
        self.complete = False
        self._tail = b""
        self._recent: deque[bytes] = deque(maxlen=READS_KEPT)

    def feed(self, data: bytes) -> int:
        """Scan one read and return the number of content events whose marker it completes."""
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
        """The token count of the server's usage event, or None without one."""
        match = COMPLETION_TOKENS.search(b"".join(self._recent))
        return int(match[1]) if match else None
