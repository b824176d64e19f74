"""SGLang's objects, as far as the adapter uses them."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

Chunk = Mapping[str, Any]


class Notified(Protocol):
    """What SGLang's receiving loop sets, and the generator of a request waits for: an asyncio.Event."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    async def wait(self) -> object: ...


class RequestState(Protocol):
    """A request in SGLang's tokenizer manager, with the chunks that its generator has not taken."""

    dispatched: bool
    finished: bool
    event: Notified
    out_list: list[Chunk]


class Watchdog(Protocol):
    """The thread that kills this process when one of SGLang's has died."""

    def stop(self) -> None: ...


class Snapshot(Protocol):
    """The load of one data-parallel rank, in tokens."""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int


class SnapshotReader(Protocol):
    """Reads the load that the schedulers publish."""

    def read_all(self) -> Sequence[Snapshot]: ...
    def close(self) -> None: ...


class Socket(Protocol):
    """A ZeroMQ socket."""

    context: Any

    def close(self, linger: int | None = None) -> None: ...


class ModelConfig(Protocol):
    """SGLang's reading of config.json."""

    vocab_size: int
    hidden_size: int
    context_len: int
    dtype: Any
    is_multimodal: bool
    is_image_understandable_model: bool
    is_audio_understandable_model: bool
    hf_eos_token_id: set[int] | None
    is_matryoshka: object
    matryoshka_dimensions: list[int] | None

    def get_default_sampling_params(self) -> dict[str, Any]: ...


class BootstrapServer(Protocol):
    """The server that prefill and decode engines connect through."""

    def close(self) -> None: ...


class Manager(Protocol):
    """SGLang's front half, which lives in this process: its TokenizerManager."""

    event_loop: asyncio.AbstractEventLoop | None
    rid_to_state: Mapping[str, RequestState]
    model_config: ModelConfig
    load_snapshot_reader: SnapshotReader
    recv_from_detokenizer: Socket
    send_to_scheduler: Socket
    bootstrap_server: BootstrapServer | None
    initial_weights_loaded: bool
    lora_ref_cache: dict[str, Any]
    mm_processor: Any
    _subprocess_watchdog: Watchdog | None

    async def handle_loop(self) -> None: ...
    def generate_request(self, request: Any, http: None = None) -> AsyncGenerator[Any, None]: ...
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...
    def config_value(self, name: str) -> Any: ...
    async def pause_generation(self, request: Any) -> None: ...
    async def continue_generation(self, request: Any) -> None: ...
    async def flush_cache(self, timeout_s: float | None = None) -> Any: ...
    async def release_memory_occupation(self, request: Any, http: None = None) -> None: ...
    async def resume_memory_occupation(self, request: Any, http: None = None) -> None: ...
    async def update_weights_from_disk(self, request: Any, http: None = None) -> tuple[bool, str, int]: ...
    async def update_weights_from_tensor(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def update_weights_from_distributed(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def update_weights_from_ipc(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def begin_weight_update(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def end_weight_update(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def init_weights_update_group(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def destroy_weights_update_group(self, request: Any, http: None = None) -> tuple[bool, str]: ...
    async def update_weight_version(self, request: Any) -> None: ...
    async def start_profile(self, request: Any = None) -> Any: ...
    async def stop_profile(self) -> Any: ...
    async def start_expert_distribution_record(self) -> None: ...
    async def stop_expert_distribution_record(self) -> None: ...
    async def dump_expert_distribution_record(self) -> None: ...
    async def load_lora_adapter(self, request: Any, http: None = None) -> Any: ...
    async def unload_lora_adapter(self, request: Any, http: None = None) -> Any: ...
    @property
    def lora_registry(self) -> Any: ...


class ServerArgs(Protocol):
    """SGLang's own settings."""

    log_level: str

    def resolved_dict(self) -> dict[str, Any]: ...


class SchedulerInfo(Protocol):
    """What came of starting the schedulers."""

    scheduler_infos: list[dict[str, Any]]


class Engine(Protocol):
    """SGLang's Engine."""

    tokenizer_manager: Manager | None
    server_args: ServerArgs
    port_args: Any
    send_to_rpc: Socket | None
    loop: asyncio.AbstractEventLoop
    _scheduler_init_result: SchedulerInfo

    def get_all_child_pids(self) -> list[int]: ...
    def shutdown(self) -> None: ...
