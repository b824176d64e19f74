"""The metrics of workers, declared."""

from collections.abc import Iterator

from baton import errors
from baton.errors import BatonError
from baton.metrics.families import SECONDS, Family, Label
from baton.protocol.lifecycle import TERMINAL


def _codes(error: type[BatonError]) -> Iterator[str]:
    yield error.code
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:  # others have the code of one of these
            yield from _codes(child)


WORKERS = ("aggregated", "prefill", "decode", "encode", "embed", "process")
GENERATING = ("aggregated", "prefill", "decode")
ENGINES = ("aggregated", "prefill", "decode", "encode", "embed")
COMMAND_SECONDS = (0.001, 0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)

ROLE = Label("role", WORKERS)
ROLE_OR_CANARY = Label("role", (*WORKERS, "canary"))
STATE = Label("state", tuple(sorted(state.value for state in TERMINAL)))
CODE = Label("code", tuple(sorted(set(_codes(BatonError)))))
TRANSPORT = Label("transport", ("shm", "nixl", "tcp"))
_COMMAND = Label("command", source="paths of the control API, or `unknown`")
_RANK = Label("dp_rank", source="data-parallel ranks of the engine")

REQUESTS = Family(
    name="baton_requests_total",
    kind="counter",
    unit="requests",
    meaning="Requests by the state that they ended in. The worker's own probes have the role canary",
    processes=(*WORKERS, "router"),
    labels=(ROLE_OR_CANARY, STATE),
)
ERRORS = Family(
    name="baton_errors_total",
    kind="counter",
    unit="requests",
    meaning="Requests that failed or were refused, by error code",
    processes=(*WORKERS, "router"),
    labels=(CODE,),
)
TOKENS = Family(
    name="baton_tokens_total",
    kind="counter",
    unit="tokens",
    meaning="Tokens of requests that have ended: of prompts, of prompts found in the prefix cache, and generated."
    " A prefill and a decode worker both count the prompt",
    processes=WORKERS,
    labels=(ROLE, Label("kind", ("prompt", "cached", "completion"))),
)
FIRST_OUTPUT = Family(
    name="baton_first_output_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time from the admission of a request to its first output, which is its first token where tokens are"
    " generated",
    processes=WORKERS,
    labels=(ROLE,),
    buckets=SECONDS,
)
DURATION = Family(
    name="baton_request_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time from the admission of a request to its end",
    processes=(*WORKERS, "router"),
    labels=(ROLE,),
    buckets=SECONDS,
)
QUEUE = Family(
    name="baton_queue_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time that a request waited in the engine before its first step, where the engine reports it",
    processes=GENERATING,
    labels=(ROLE,),
    buckets=SECONDS,
)
PREFILL = Family(
    name="baton_prefill_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time from the first step of a request to its first token, on the worker that computes its prompt",
    processes=("aggregated", "prefill"),
    labels=(ROLE,),
    buckets=SECONDS,
)
TOKEN_GAP = Family(
    name="baton_token_gap_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time between two outputs of a request after the first, as they leave the worker",
    processes=("aggregated", "decode", "process"),
    labels=(ROLE,),
    buckets=GAP_SECONDS,
)
IN_FLIGHT = Family(
    name="baton_requests_in_flight",
    kind="gauge",
    unit="requests",
    meaning="Requests that were admitted and have not ended",
    processes=(*WORKERS, "router"),
)
HEALTHY = Family(
    name="baton_healthy",
    kind="gauge",
    unit="0 or 1",
    meaning="1 while canary and watchdog find no fault. 0 during the start",
    processes=WORKERS,
)
MODEL_LOAD = Family(
    name="baton_model_load_seconds",
    kind="gauge",
    unit="seconds",
    meaning="Time that the engine took to start, which is mostly the loading of the model",
    processes=ENGINES,
)
STEPS = Family(
    name="baton_engine_steps_total",
    kind="counter",
    unit="steps",
    meaning="Steps of the engine. An engine with running requests and no steps is stalled",
    processes=ENGINES,
)
RUNNING = Family(
    name="baton_engine_running_requests",
    kind="gauge",
    unit="requests",
    meaning="Requests that take part in the steps of the engine, by rank",
    processes=GENERATING,
    labels=(_RANK,),
)
WAITING = Family(
    name="baton_engine_waiting_requests",
    kind="gauge",
    unit="requests",
    meaning="Requests that wait in the engine, by rank",
    processes=GENERATING,
    labels=(_RANK,),
)
BLOCKS = Family(
    name="baton_engine_kv_blocks",
    kind="gauge",
    unit="blocks",
    meaning="KV blocks by use and rank",
    processes=GENERATING,
    labels=(Label("use", ("used", "free")), _RANK),
)
COMMANDS = Family(
    name="baton_commands_total",
    kind="counter",
    unit="commands",
    meaning="Commands of operators by outcome: `ok` or the code of the error",
    processes=ENGINES,
    labels=(_COMMAND, Label("outcome", source="`ok` and the error codes of the control API")),
)
COMMAND_DURATION = Family(
    name="baton_command_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Duration of operators' commands",
    processes=ENGINES,
    labels=(_COMMAND,),
    buckets=COMMAND_SECONDS,
)
OPEN_ROOMS = Family(
    name="baton_rooms_open",
    kind="gauge",
    unit="rooms",
    meaning="KV of prompts, or encoded media, that waits for another worker (offered) or is fetched (claimed)",
    processes=("prefill", "encode"),
    labels=(Label("state", ("offered", "claimed")),),
)
ENDED_ROOMS = Family(
    name="baton_rooms_ended_total",
    kind="counter",
    unit="rooms",
    meaning="Handoffs by outcome. `expired`: not claimed within --kv-claim-timeout-s",
    processes=("prefill", "encode"),
    labels=(Label("outcome", ("done", "failed", "expired", "cancelled")),),
)
TRANSFER_BYTES = Family(
    name="baton_transfer_bytes_total",
    kind="counter",
    unit="bytes",
    meaning="KV and encoded media fetched from other workers",
    processes=("aggregated", "prefill", "decode"),
    labels=(TRANSPORT,),
)
TRANSFER_DURATION = Family(
    name="baton_transfer_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Duration of each fetch of blocks from another worker; a handoff that moves while the prompt is computed"
    " has several",
    processes=("aggregated", "prefill", "decode"),
    labels=(TRANSPORT,),
    buckets=SECONDS,
)
MEDIA_LOOKUPS = Family(
    name="baton_media_cache_lookups_total",
    kind="counter",
    unit="items",
    meaning="Media of requests that were in the embedding cache (hit), or were encoded or fetched (miss)",
    processes=("aggregated", "prefill", "encode"),
    labels=(Label("result", ("hit", "miss")),),
)
MEDIA_BYTES = Family(
    name="baton_media_cache_bytes",
    kind="gauge",
    unit="bytes",
    meaning="Embeddings in memory, at most --media-cache-bytes",
    processes=("aggregated", "prefill", "encode"),
)
MEDIA_ITEMS = Family(
    name="baton_media_cache_items",
    kind="gauge",
    unit="items",
    meaning="Encoded media in memory: pinned by requests or offers, or only cached",
    processes=("aggregated", "prefill", "encode"),
    labels=(Label("use", ("pinned", "cached")),),
)

FAMILIES = (
    REQUESTS,
    ERRORS,
    TOKENS,
    FIRST_OUTPUT,
    DURATION,
    QUEUE,
    PREFILL,
    TOKEN_GAP,
    IN_FLIGHT,
    HEALTHY,
    MODEL_LOAD,
    STEPS,
    RUNNING,
    WAITING,
    BLOCKS,
    OPEN_ROOMS,
    ENDED_ROOMS,
    TRANSFER_BYTES,
    TRANSFER_DURATION,
    MEDIA_LOOKUPS,
    MEDIA_BYTES,
    MEDIA_ITEMS,
    COMMANDS,
    COMMAND_DURATION,
)
