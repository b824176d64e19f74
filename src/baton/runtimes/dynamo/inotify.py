"""Inotify instances, of which Linux allows a user a number: discovery by files needs one for each watched endpoint."""

import ctypes
import errno
import os

REMEDY = (
    "this user is out of inotify instances, of which discovery by files needs one for each endpoint; raise the limit"
    " with `sudo sysctl fs.inotify.max_user_instances=1024`, or use --runtime-discovery etcd"
)


def explain(error: BaseException) -> str:
    """Return the runtime's message, with the remedy where the message does not name it."""
    return f"{error}: {REMEDY}" if "Too many open files" in str(error) else str(error)


def out_of_instances() -> bool:
    """Whether this user cannot have another instance now."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        return ctypes.get_errno() == errno.EMFILE
    os.close(descriptor)
    return False
