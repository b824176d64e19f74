"""The threads on which engines decode media: few, so that the memory of decoded media is bounded."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from baton.media.threads import ThreadPool

T = TypeVar("T")

_POOL = ThreadPool("media-decode", max(2, min(4, os.cpu_count() or 2)))


async def run_decoding(work: Callable[..., T], *args: Any) -> T:
    """Do `work`, such as `decode_image(file)`, on a thread for decoding, and return its result."""
    return await _POOL.run(work, *args)
