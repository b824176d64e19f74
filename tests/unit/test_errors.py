"""The exception tree, and what becomes of it at the edge."""

import asyncio
import logging

import pytest
from dynamo import _core
from dynamo.llm.exceptions import HttpError

from baton import errors
from baton.errors import BatonError, InvalidRequest
from baton.runtimes.dynamo.errors import from_runtime, to_runtime


def tree(cls: type[BatonError] = BatonError) -> list[type[BatonError]]:
    """Return `cls` and what comes from it, without what a module has for itself."""
    own = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(error for sub in own for error in tree(sub))]


ALL = tree()
RUNTIME_ERRORS = (_core.DynamoException, HttpError)


def test_every_error_of_the_module_is_in_the_tree() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(ALL)


def test_codes_are_unique() -> None:
    codes = [error.code for error in ALL]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("error", ALL)
def test_every_error_says_whom_it_harms_and_what_the_client_sees(error: type[BatonError]) -> None:
    assert error.__doc__
    assert error.scope in ("request", "worker")
    assert 400 <= error.status <= 599
    assert error("why").message == str(error("why")) == "why"


@pytest.mark.parametrize("error", [error for error in ALL if error.retryable])
def test_what_can_be_retried_is_never_the_clients_fault(error: type[BatonError]) -> None:
    assert error.status >= 500


@pytest.mark.parametrize("error", ALL)
def test_every_error_becomes_one_that_the_runtime_knows_with_its_message(error: type[BatonError]) -> None:
    outside = to_runtime(error("the reason"))
    assert isinstance(outside, RUNTIME_ERRORS)
    assert "the reason" in str(outside)


@pytest.mark.parametrize("error", [error for error in ALL if issubclass(error, InvalidRequest)])
def test_an_invalid_request_becomes_an_invalid_argument(error: type[BatonError]) -> None:
    assert isinstance(to_runtime(error("temperature: too hot")), _core.InvalidArgument)


@pytest.mark.parametrize("error", [error for error in ALL if error.retryable])
def test_a_retryable_error_becomes_one_that_the_frontend_retries(error: type[BatonError]) -> None:
    assert isinstance(to_runtime(error("not here")), (_core.Disconnected, _core.EngineShutdown))


def test_an_error_that_is_not_ours_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        outside = to_runtime(KeyError("a secret"))
    assert isinstance(outside, _core.Unknown)
    assert "a secret" not in str(outside)
    assert "a secret" in caplog.text


def test_a_cancelled_task_is_a_cancelled_request() -> None:
    assert isinstance(to_runtime(asyncio.CancelledError()), _core.Cancelled)


@pytest.mark.parametrize(
    "error",
    [value for value in vars(_core).values() if isinstance(value, type) and issubclass(value, _core.DynamoException)],
)
def test_every_error_of_the_runtime_becomes_one_of_ours(error: type[Exception]) -> None:
    ours = from_runtime(error("the reason"))
    assert isinstance(ours, BatonError)
    assert "the reason" in ours.message


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (_core.CannotConnect("no route"), True),
        (_core.RouterQueueLimitExceeded("full"), True),
        (Exception("Unavailable: Worker disconnected before response stream was established"), True),
        (ValueError("Unavailable: peer_lost: the reason"), True),
        (ValueError("Internal: engine_failed: the reason"), False),
        (ValueError("Internal: RuntimeError: a bug"), False),
    ],
)
def test_only_what_the_request_did_not_cause_is_worth_a_retry(error: Exception, retryable: bool) -> None:
    assert from_runtime(error).retryable is retryable
