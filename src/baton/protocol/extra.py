"""Keys that this version has no field for: a struct with an `extra` field keeps them, and forwards them unchanged."""

import secrets

import msgspec

Extra = dict[str, object]

# Random, so that no message can contain it: the codec fills the field with the keys that have no field of their own.
EXTRA_KEY = f"<extra {secrets.token_hex(8)}>"


def extra_field() -> Extra:
    """Return the default of an `extra` field."""
    field: Extra = msgspec.field(default_factory=dict, name=EXTRA_KEY)
    return field
