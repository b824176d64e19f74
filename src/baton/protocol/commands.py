"""What an operator can ask of a running engine: a tagged union of verbs, and what came of one."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Tags = Annotated[tuple[Name, ...], Meta(min_length=1)]
Timeout = Annotated[float, Meta(gt=0, le=3600)]


class ReleaseMemory(msgspec.Struct, frozen=True, kw_only=True, tag="release_memory", forbid_unknown_fields=True):
    """Give the memory of these tags back to the machine; requests wait until all of it has been resumed."""

    tags: Tags


class ResumeMemory(msgspec.Struct, frozen=True, kw_only=True, tag="resume_memory", forbid_unknown_fields=True):
    """Take the memory of these tags again, in as many stages as the caller likes."""

    tags: Tags


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause", forbid_unknown_fields=True):
    """Stop stepping. Running requests stay in place (keep), go back to the queue (retract), are ended (abort), or are
    let finish first (drain), in `timeout_s` or nothing changes.

    What stays keeps its KV; what goes back to the queue gives it up and computes it again; both go on at `Continue`.
    Draining is the worker's work: an engine never sees that mode.
    """

    mode: Literal["abort", "retract", "keep", "drain"] = "keep"
    timeout_s: Timeout = 60.0


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag="continue", forbid_unknown_fields=True):
    """Step again after a pause."""


class ClearCache(msgspec.Struct, frozen=True, kw_only=True, tag="clear_cache", forbid_unknown_fields=True):
    """Forget every block that could be reused."""


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile", forbid_unknown_fields=True):
    """Begin to record where the time goes; by itself it ends after `steps` steps, if given."""

    directory: Name
    steps: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile", forbid_unknown_fields=True):
    """End the recording and write it out."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor by name, as the model's own files name it."""

    name: Name
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: tuple[Annotated[int, Meta(ge=0)], ...]


class FromDisk(msgspec.Struct, frozen=True, kw_only=True, tag="disk", forbid_unknown_fields=True):
    """Weights in a model directory."""

    path: Name


class InlineTensor(TensorSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor with its bytes, little-endian and in row order; base64 in JSON."""

    data: bytes


class FromTensors(msgspec.Struct, frozen=True, kw_only=True, tag="tensors", forbid_unknown_fields=True):
    """Weights in the request itself."""

    tensors: tuple[InlineTensor, ...]


class SharedTensor(TensorSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor inside a shared-memory segment."""

    offset: Annotated[int, Meta(ge=0)]


class FromSharedMemory(msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory", forbid_unknown_fields=True):
    """Weights in a POSIX shared-memory segment of this machine; its owner keeps it until the update has returned."""

    segment: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,200}$")]
    tensors: tuple[SharedTensor, ...]


class FromGroup(msgspec.Struct, frozen=True, kw_only=True, tag="group", forbid_unknown_fields=True):
    """Weights that rank 0 of a process group broadcasts, tensor by tensor, in this order, all within the time given."""

    group: Name
    tensors: tuple[TensorSpec, ...]
    timeout_s: Timeout = 60.0


class FromIpc(msgspec.Struct, frozen=True, kw_only=True, tag="ipc", forbid_unknown_fields=True):
    """Weights in GPU memory of another process of this machine, by the engine's own handles: one for each device."""

    handles: dict[Name, Name]


WeightSource = FromDisk | FromTensors | FromSharedMemory | FromGroup | FromIpc


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag="update_weights", forbid_unknown_fields=True):
    """Put new weights in place, all or none. Requests that run are retracted and go on with the new weights."""

    source: WeightSource
    version: Name


class SetWeightVersion(msgspec.Struct, frozen=True, kw_only=True, tag="set_weight_version", forbid_unknown_fields=True):
    """Call the weights that are in place `version`; running requests are not touched."""

    version: Name


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join_group", forbid_unknown_fields=True):
    """Join a process group that weights will come through; returns when every rank is there.

    Rank 0 is the one that sends, and keeps the meeting place at `host` and `port`.
    """

    group: Name
    host: Name
    port: Annotated[int, Meta(ge=1, le=65535)]
    rank: Annotated[int, Meta(ge=1)]
    size: Annotated[int, Meta(ge=2)]
    timeout_s: Timeout = 60.0


class LeaveGroup(msgspec.Struct, frozen=True, kw_only=True, tag="leave_group", forbid_unknown_fields=True):
    """Leave a process group."""

    group: Name


class StartExpertRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag="start_expert_record", forbid_unknown_fields=True
):
    """Begin to count which experts the tokens go to."""


class StopExpertRecord(msgspec.Struct, frozen=True, kw_only=True, tag="stop_expert_record", forbid_unknown_fields=True):
    """Count no further; what was counted is kept."""


class DumpExpertRecord(msgspec.Struct, frozen=True, kw_only=True, tag="dump_expert_record", forbid_unknown_fields=True):
    """Write out what was counted; the outcome says where."""


class LoadLora(msgspec.Struct, frozen=True, kw_only=True, tag="load_lora", forbid_unknown_fields=True):
    """Take in the adapter in a directory, under a name that requests use; a name that is in use is refused."""

    name: Name
    path: Name


class UnloadLora(msgspec.Struct, frozen=True, kw_only=True, tag="unload_lora", forbid_unknown_fields=True):
    """Forget an adapter, when the requests that use it have ended."""

    name: Name


class ListLoras(msgspec.Struct, frozen=True, kw_only=True, tag="list_loras", forbid_unknown_fields=True):
    """Tell which adapters are loaded."""


Command = (
    ReleaseMemory
    | ResumeMemory
    | Pause
    | Continue
    | ClearCache
    | StartProfile
    | StopProfile
    | UpdateWeights
    | SetWeightVersion
    | JoinGroup
    | LeaveGroup
    | StartExpertRecord
    | StopExpertRecord
    | DumpExpertRecord
    | LoadLora
    | UnloadLora
    | ListLoras
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a verb; only what it concerns is set.

    `path` is where a profile or a record is, or will be; `requests` how many a verb has touched; `released` the tags
    that are given back, `paused` whether an operator's pause holds, and `adapters` the names of those that are loaded,
    after the verb.
    """

    message: str
    weight_version: str | None = None
    path: str | None = None
    requests: int | None = None
    released: tuple[str, ...] | None = None
    paused: bool | None = None
    adapters: tuple[str, ...] | None = None
