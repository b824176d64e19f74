# What Baton uses of ai-dynamo-runtime 1.6.1. The stub it ships imports a package it does not depend on.
import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

Wire = dict[str, object]

class ContextMetadata:
    def copy(self) -> dict[str, str]: ...

class Context:
    def __init__(self, id: str | None = None, metadata: dict[str, str] | None = None) -> None: ...
    @property
    def metadata(self) -> ContextMetadata: ...
    def id(self) -> str: ...
    def trace_headers(self) -> dict[str, str] | None: ...
    def async_killed_or_stopped(self) -> asyncio.Future[bool]: ...
    def stop_generating(self) -> None: ...

class Client:
    def instance_ids(self) -> list[int]: ...
    def wait_for_instances(self) -> asyncio.Future[list[int]]: ...
    def round_robin(
        self, request: Wire, annotated: bool | None = True, context: Context | None = None
    ) -> asyncio.Future[AsyncIterator[Wire]]: ...
    def direct(
        self, request: Wire, instance_id: int, annotated: bool | None = True, context: Context | None = None
    ) -> asyncio.Future[AsyncIterator[Wire]]: ...

class Endpoint:
    def serve_endpoint(self, handler: Callable[..., Any]) -> asyncio.Future[None]: ...
    def client(self) -> asyncio.Future[Client]: ...
    def connection_id(self) -> int: ...
    def unregister_endpoint_instance(self) -> asyncio.Future[None]: ...
    def register_endpoint_instance(self) -> asyncio.Future[None]: ...

class FpmEventSubscriber:
    def __init__(self, endpoint: Endpoint) -> None: ...
    def start_tracking(self) -> None: ...
    def get_model_cards(self) -> dict[str, str]: ...
    def shutdown(self) -> None: ...

class DistributedRuntime:
    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop,
        discovery_backend: str,
        request_plane: str,
        *,
        event_plane: str | None = None,
    ) -> None: ...
    def endpoint(self, path: str) -> Endpoint: ...
    def shutdown(self) -> None: ...
    def system_status_server_url(self) -> str | None: ...

class ModelInput:
    Text: ModelInput
    Tokens: ModelInput

class ModelType:
    Chat: ModelType
    Completions: ModelType
    Embedding: ModelType
    Empty: ModelType
    Prefill: ModelType
    def __or__(self, other: ModelType) -> ModelType: ...

class WorkerType:
    Prefill: WorkerType
    Decode: WorkerType
    Encode: WorkerType
    Aggregated: WorkerType

def get_tool_parser_names() -> list[str]: ...
def get_reasoning_parser_names() -> list[str]: ...

class RouterMode:
    RoundRobin: RouterMode
    Random: RouterMode
    PowerOfTwoChoices: RouterMode
    LeastLoaded: RouterMode
    Direct: RouterMode
    KV: RouterMode

class KvRouterConfig:
    def __init__(self, *, router_policy_config: str | None = None) -> None: ...

class RoutingConstraints:
    def __init__(self, required_taints: set[str], preferred_taints: dict[str, float]) -> None: ...

class KvRouter:
    def __init__(self, endpoint: Endpoint, block_size: int, kv_router_config: KvRouterConfig) -> None: ...
    def best_worker(
        self,
        token_ids: object,
        *,
        request_id: str | None = None,
        lora_name: object = None,
        routing_constraints: RoutingConstraints | None = None,
        strict_priority: object = 0,
        cache_namespace: object = None,
    ) -> asyncio.Future[tuple[int, int, int]]: ...
    def mark_prefill_complete(self, request_id: str) -> asyncio.Future[None]: ...
    def free(self, request_id: str) -> asyncio.Future[None]: ...

class RouterConfig:
    def __init__(
        self,
        mode: RouterMode,
        config: KvRouterConfig | None = None,
        *,
        active_decode_blocks_threshold: float | None = None,
        session_affinity_ttl_secs: int | None = None,
        session_affinity_mode: str = "hard",
    ) -> None: ...

class ModelRuntimeConfig:
    context_length: int | None
    total_kv_blocks: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    data_parallel_size: int
    kv_event_publishing_enabled: bool | None
    enable_local_indexer: bool | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    taints: set[str]
    topology_domains: dict[str, str]
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    def set_structural_tag(self, structural_tag: dict[str, str] | None) -> None: ...
    def set_disaggregated_endpoint(self, bootstrap_host: str, bootstrap_port: int) -> None: ...
    def set_engine_specific(self, key: str, value: str) -> None: ...

class KvEventPublisher:
    def __init__(
        self, endpoint: Endpoint, *, kv_block_size: int, dp_rank: int = 0, enable_local_indexer: bool = False
    ) -> None: ...
    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None: ...
    def publish_removed(self, block_hashes: list[int]) -> None: ...
    def shutdown(self) -> None: ...

class WorkerMetricsPublisher:
    def create_endpoint(self, endpoint: Endpoint) -> asyncio.Future[None]: ...
    def publish(
        self, dp_rank: int | None = None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None: ...

class EngineType:
    Dynamic: EngineType

class EntrypointArgs:
    def __init__(
        self,
        engine_type: EngineType,
        *,
        http_host: str | None = None,
        http_port: int | None = None,
        router_config: RouterConfig | None = None,
        migration_limit: int = 0,
        namespace: str | None = None,
        enable_anthropic_api: bool | None = None,
        chat_engine_factory: Callable[..., Any] | None = None,
    ) -> None: ...

class ModelDeploymentCard:
    def name(self) -> str: ...
    def to_json_str(self) -> str: ...

class RoutedEngine:
    def generate(self, preprocessed: Wire, context: Context | None = None) -> asyncio.Future[AsyncIterator[Any]]: ...

class PythonAsyncEngine:
    def __init__(self, generator: Callable[..., Any], event_loop: asyncio.AbstractEventLoop) -> None: ...

class EngineConfig: ...

def make_engine(distributed_runtime: DistributedRuntime, args: EntrypointArgs) -> asyncio.Future[EngineConfig]: ...
def run_input(
    distributed_runtime: DistributedRuntime, input: str, engine_config: EngineConfig
) -> asyncio.Future[None]: ...
def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    *,
    worker_type: WorkerType,
    kv_cache_block_size: int | None = None,
    router_config: RouterConfig | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    custom_template_path: str | None = None,
    needs: list[list[WorkerType]] | None = None,
    skip_model_assets: bool = False,
    lora_name: str | None = None,
    base_model_path: str | None = None,
) -> asyncio.Future[None]: ...
def unregister_model(endpoint: Endpoint, lora_name: str | None = None) -> asyncio.Future[None]: ...

class DynamoException(Exception): ...
class Unknown(DynamoException): ...
class InvalidArgument(DynamoException): ...
class CannotConnect(DynamoException): ...
class Disconnected(DynamoException): ...
class ConnectionTimeout(DynamoException): ...
class Cancelled(DynamoException): ...
class EngineShutdown(DynamoException): ...
class StreamIncomplete(DynamoException): ...
class WorkerUnavailable(DynamoException): ...
