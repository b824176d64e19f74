"""The runtime: carries requests between processes, and discovery. It knows neither roles nor engines.

`baton.testing.RuntimeContract` checks every rule here.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from baton.protocol.events import Reading

Wire = dict[str, object]
Req = TypeVar("Req")
Rep = TypeVar("Rep")
SendNow = Callable[[Rep], bool]
"""Send a reply past the iterator, which costs less, and only while the caller of that waits for its next item. Returns
False without sending it if that could block. Raises Cancelled when the caller of the request has disconnected."""


class Context(Protocol):
    """The caller of a request."""

    @property
    def id(self) -> str:
        """The request id of the frontend; the same for every attempt of one request."""

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """W3C trace headers and the client's request ids, to pass on unchanged; empty when there is no trace."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the event loop, when the caller disconnects; at once if it already has."""


class Service(Generic[Req, Rep]):
    """A typed handler with its codec, served by a runtime."""

    def __init__(
        self,
        handle: Callable[[Req, Context], AsyncGenerator[Rep, None]],
        decode: Callable[[object], Req],
        encode: Callable[[Rep], Wire],
    ) -> None:
        self._handle = handle
        self.decode = decode
        self.encode = encode

    def handle(self, request: Req, context: Context, send_now: SendNow[Rep]) -> AsyncGenerator[Rep, None]:
        """Return the replies to a request, but for those that the handler sends with `send_now`."""
        return self._handle(request, context)


class PushService(Service[Req, Rep]):
    """A Service whose handler can also send replies past its iterator."""

    def __init__(
        self,
        handle: Callable[[Req, Context, SendNow[Rep]], AsyncGenerator[Rep, None]],
        decode: Callable[[object], Req],
        encode: Callable[[Rep], Wire],
    ) -> None:
        self._push = handle
        self.decode = decode
        self.encode = encode

    def handle(self, request: Req, context: Context, send_now: SendNow[Rep]) -> AsyncGenerator[Rep, None]:
        """See `Service.handle`."""
        return self._push(request, context, send_now)


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How frontends render the prompts of a model that takes tokens, and parse its answers.

    `template` is a file that replaces the model's chat template. Without `tool_call_parser`, requests with tools are
    refused; without `reasoning_parser`, reasoning is part of the content.
    """

    template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class Locality(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a worker. KV moves only (`required`) or preferably between workers of one place."""

    domain: str
    value: str
    enforcement: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model, as it is registered for frontends and routers.

    Clients may use any of `other_names` in place of `name`. `router` is how frontends select among the workers of this
    type, None for their own setting.
    """

    name: str
    other_names: tuple[str, ...] = ()
    directory: str
    model_input: str = "tokens"
    surfaces: frozenset[str] = frozenset({"chat", "completions"})
    worker_type: str = "aggregated"
    needs: tuple[tuple[str, ...], ...] = ()
    context_length: int
    block_size: int
    total_blocks: int
    max_running: int
    max_batch_tokens: int | None = None
    handoff_host: str | None = None
    handoff_port: int | None = None
    kv_events: bool = False
    dp_size: int = 1
    chat: ChatFormat = ChatFormat()
    router: str | None = None
    taints: frozenset[str] = frozenset()
    locality: Locality | None = None


class Endpoint(Protocol):
    """One served endpoint of this process."""

    @property
    def instance_id(self) -> int:
        """The id of this instance in discovery."""

    @property
    def is_registered(self) -> bool:
        """Whether discovery has this instance now. It drops one that sent no heartbeat for some seconds."""

    async def register_model(self, card: ModelCard) -> None:
        """Register the model under all its names, once; from then on frontends send requests to this instance."""

    async def register_adapter(self, name: str) -> None:
        """Register a LoRA adapter of the model: frontends then send this instance requests for a model of that name.

        Valid after `register_model`. Idempotent. Raises InvalidRequest for a name of the model itself.
        """

    async def deregister_adapter(self, name: str) -> None:
        """Undo `register_adapter`; running requests continue. Idempotent."""

    def publish(self, reading: Reading) -> None:
        """Publish the load of this instance or a KV event to routers. Never blocks.

        Valid after `register_model`; KV events are published only with a card that has `kv_events`.
        """

    async def deregister(self) -> None:
        """Leave discovery; running requests continue. Idempotent."""

    async def register(self) -> None:
        """Enter discovery again after `deregister`. Idempotent."""


class Client(Protocol):
    """Calls the instances of one endpoint, in any process."""

    def instances(self) -> list[int]:
        """The instances that are in discovery now."""

    async def ready(self, timeout_s: float) -> list[int]:
        """Wait for at least one instance. Raises PeerLost after `timeout_s`."""

    def call(
        self, request: Wire, instance: int | None = None, parent: Context | None = None
    ) -> AsyncGenerator[Wire, None]:
        """Send `request` and iterate over its replies; closing the iterator cancels the request in the other process.

        The call carries the trace of `parent` and is cancelled when `parent` is. Raises the errors of `errors.py`.
        """


class ModelClient(Protocol):
    """Calls the workers of a model as a frontend does: they are selected, called in the order of their roles (encode,
    prefill, decode), and replaced when they fail."""

    async def start(self) -> None:
        """Begin to look for the workers; the runtime has been started. Raises PeerLost."""

    async def ready(self, timeout_s: float) -> ModelCard:
        """Wait until the model can be called; return its card. Raises PeerLost after `timeout_s`."""

    def call(self, request: Wire, parent: Context) -> AsyncGenerator[Wire, None]:
        """Send a request in token format and iterate over its chunks; closing the iterator cancels the request.

        The call carries the trace of `parent` and is cancelled when `parent` is. Raises the errors of `errors.py`.
        """

    def close(self) -> None:
        """Free everything; the runtime has shut down. Idempotent."""


class Runtime(Protocol):
    """This process as a member of the cluster."""

    async def start(self) -> None:
        """Join the cluster. Raises ConfigError when an address is in use or a service cannot be reached."""

    async def serve(self, path: str, service: Service[Req, Rep]) -> Endpoint:
        """Serve `path` ("namespace.component.endpoint") until `shutdown`. Requests may run concurrently.

        An error raised by the handler reaches the caller as its type; cancellation by the caller fires `on_cancel`
        and then closes the handler's iterator.
        """

    async def client(self, path: str, kv_block_size: int | None = None) -> Client:
        """Return a client for the instances of `path`.

        With `kv_block_size`, the size of the instances' KV blocks, calls that name no instance go where the prefix of
        their `token_ids` is cached, by the KV events of the instances; without, round robin.
        """

    async def restore(self) -> None:
        """Enter discovery again, models included, with every endpoint that discovery has lost and that should be in it.

        Not concurrent with `register` and `deregister` of its endpoints. Raises PeerLost if discovery refuses.
        """

    async def metrics(self) -> str:
        """Return the runtime's own metrics as Prometheus text; "" if it has none, or is not running."""

    async def shutdown(self) -> None:
        """Leave the cluster: cancel running handlers, end every served endpoint and free everything. Idempotent."""
