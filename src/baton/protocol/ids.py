"""Request ids: our own, unique per attempt, and never the trace id."""

import itertools
from typing import NewType

RequestId = NewType("RequestId", str)

_attempts = itertools.count(1)


def new_request_id(context_id: str) -> RequestId:
    """Return an id that no other request of this process has.

    The frontend keeps one context id across migrations, so two attempts of one request can run on one worker; the
    attempt number distinguishes them.
    """
    return RequestId(f"{context_id}.{next(_attempts)}")
