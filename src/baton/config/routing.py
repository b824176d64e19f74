"""Names of the ways in which a frontend selects a worker."""

from typing import Literal

RouterName = Literal["round-robin", "random", "power-of-two", "least-loaded", "direct", "kv"]
RoleRouterName = Literal["auto", "round-robin", "random", "power-of-two", "least-loaded", "kv"]
"""Without direct: a request would have to name a worker of each role."""
