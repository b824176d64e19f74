"""The phases of a request, as timelines name them. `docs/timelines.md` explains each."""

from typing import Literal

Phase = Literal[
    "received",
    "admitted",
    "media_fetched",
    "encoded",
    "submitted",
    "queued",
    "first_step",
    "prefill_chunk",
    "kv_offered",
    "kv_claimed",
    "kv_moved",
    "first_token",
    "finished",
    "forwarded",
    "pool_selected",
    "retried",
]
