"""The runtime: how requests reach this process and how processes find each other. It knows neither roles nor engines.

`baton.testing.RuntimeContract` checks every rule here.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from baton.protocol.events import Reading

Wire = dict[str, object]
Req = TypeVar("Req")
Rep = TypeVar("Rep")


class Context(Protocol):
    """Who is calling, and whether they still want the answer."""

    @property
    def id(self) -> str:
        """The request id of the frontend; the same for every attempt of one request."""

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """W3C trace headers and the client's request ids, to hand on unchanged; empty when there is no trace."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the event loop, when the caller leaves; at once if it has left already."""


class Service(Generic[Req, Rep]):
    """A typed handler with its codec: what a runtime serves."""

    def __init__(
        self,
        handle: Callable[[Req, Context], AsyncGenerator[Rep, None]],
        decode: Callable[[object], Req],
        encode: Callable[[Rep], Wire],
    ) -> None:
        self.handle = handle
        self.decode = decode
        self.encode = encode


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """How a served model is announced to frontends and routers."""

    name: str
    directory: str
    model_input: str = "tokens"
    surfaces: frozenset[str] = frozenset({"chat", "completions"})
    worker_type: str = "aggregated"
    needs: tuple[tuple[str, ...], ...] = ()
    context_length: int
    block_size: int
    total_blocks: int
    max_running: int
    handoff_host: str | None = None
    handoff_port: int | None = None
    kv_events: bool = False
    dp_size: int = 1


class Endpoint(Protocol):
    """One served endpoint of this process."""

    @property
    def instance_id(self) -> int:
        """The id that discovery knows this instance by."""

    @property
    def is_registered(self) -> bool:
        """Whether discovery has this instance now. It may lose one that showed no life for some seconds."""

    async def register_model(self, card: ModelCard) -> None:
        """Announce the model, once; from now on frontends send requests here."""

    def publish(self, reading: Reading) -> None:
        """Tell routers how busy this instance is and which blocks it holds, as the engine said so. Never blocks.

        Valid after `advertise`; which blocks is told only with a card that has `kv_events`.
        """

    async def deregister(self) -> None:
        """Leave discovery; requests that run go on. Idempotent."""

    async def register(self) -> None:
        """Come back into discovery after `withdraw`. Idempotent."""


class Client(Protocol):
    """Calls the instances of one endpoint, wherever they are."""

    def instances(self) -> list[int]:
        """The instances that discovery knows now."""

    async def ready(self, timeout_s: float) -> list[int]:
        """Wait for at least one instance. Raises PeerLost after `timeout_s`."""

    def call(
        self, request: Wire, instance: int | None = None, parent: Context | None = None
    ) -> AsyncGenerator[Wire, None]:
        """Send `request` and iterate over its answers; closing the iterator cancels it at the other side.

        The call carries the trace of `parent` and is cancelled when `parent` is. Raises the errors of `errors.py`.
        """


class Runtime(Protocol):
    """This process's place in the cluster."""

    async def start(self) -> None:
        """Join. Raises ConfigError when an address is taken or a service cannot be reached."""

    async def serve(self, path: str, service: Service[Req, Rep]) -> Endpoint:
        """Serve `path` ("namespace.component.endpoint") until `shutdown`. Requests may run concurrently.

        An error raised by the handler reaches the caller as its type; cancellation by the caller fires `on_cancel`
        and then closes the handler's iterator.
        """

    async def client(self, path: str, kv_block_size: int | None = None) -> Client:
        """Return a client for the instances of `path`.

        With `kv_block_size`, the size of the instances' KV blocks, calls that name no instance go where the beginning
        of their `token_ids` is cached, as far as the instances tell; without, to one after the other.
        """

    async def metrics(self) -> str:
        """Return the runtime's own metrics as Prometheus text; "" if it has none, or does not run."""

    async def shutdown(self) -> None:
        """Leave: end every served endpoint and free everything. Idempotent; running handlers are cancelled."""
