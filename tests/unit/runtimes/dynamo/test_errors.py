"""Errors of calls to other workers, as the caller gets them from the runtime."""

import pytest

from baton.errors import BatonError, DeadlineExceeded, EngineFailed, PeerLost
from baton.runtimes.dynamo.errors import from_runtime


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("DeadlineExceeded: TCP request to 127.0.0.1:1 timed out", PeerLost, "TCP request to 127.0.0.1:1 timed out"),
        ('Unavailable: {"message": "deadline_exceeded: too late"}', DeadlineExceeded, "too late"),
        ("Unavailable: nobody is there", PeerLost, "nobody is there"),
        ("Backend: something else", EngineFailed, "something else"),
    ],
)
def test_what_the_runtime_reports_is_told_from_what_a_worker_raised(
    text: str, kind: type[BatonError], message: str
) -> None:
    error = from_runtime(Exception(text))
    assert (type(error), error.message) == (kind, message)


def test_a_request_that_a_worker_has_not_taken_is_tried_elsewhere() -> None:
    assert from_runtime(Exception("DeadlineExceeded: TCP request to 127.0.0.1:1 timed out")).retryable
    assert not from_runtime(Exception('Unavailable: {"message": "deadline_exceeded: too late"}')).retryable
