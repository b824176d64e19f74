"""The states of a request and the transitions between them, as a table.

    received ──► admitted ──► submitted ──► streaming ──► completed   (from admitted on, if no token is left)
        │            │            │             │
        ├────────────┴────────────┴─────────────┴──► failed | cancelled | expired
        └──► refused

Every request reaches exactly one terminal state.
"""

import enum


class State(enum.StrEnum):
    """The state of a request."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    SUBMITTED = "submitted"
    STREAMING = "streaming"
    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_ENDINGS = frozenset({State.FAILED, State.CANCELLED, State.EXPIRED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.RECEIVED: _ENDINGS | {State.ADMITTED, State.REFUSED},
    State.ADMITTED: _ENDINGS | {State.SUBMITTED, State.REFUSED, State.COMPLETED},
    State.SUBMITTED: _ENDINGS | {State.STREAMING, State.COMPLETED},
    State.STREAMING: _ENDINGS | {State.COMPLETED},
    State.COMPLETED: frozenset(),
    State.REFUSED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
    State.EXPIRED: frozenset(),
}

TERMINAL = frozenset(state for state, after in TRANSITIONS.items() if not after)


class IllegalTransition(Exception):
    """A bug: the table does not have this transition."""


class Lifecycle:
    """The state of one request."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.RECEIVED

    @property
    def ended(self) -> bool:
        """Whether a terminal state has been reached."""
        return self.state in TERMINAL

    def advance(self, to: State) -> None:
        """Move to `to`. Raises IllegalTransition if the table does not have this transition."""
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state} -> {to}")
        self.state = to
