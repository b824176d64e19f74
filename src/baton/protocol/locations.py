"""Where a process is found by those that look at a deployment, such as the web view."""

import msgspec


class ProcessLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a process, the namespace that it serves in, and the URL of its control API."""

    name: str
    namespace: str
    url: str
