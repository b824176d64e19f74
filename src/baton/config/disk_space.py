"""A full disk, wherever it is noticed: the message that says so."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: BaseException) -> OSError | None:
    """Return the error of a full disk, or of a used-up quota, that `error` is or was caused by; None without one."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None
