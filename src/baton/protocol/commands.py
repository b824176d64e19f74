"""Commands of an operator to a running worker: a tagged union, and the outcome of a command."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Tags = tuple[Name, ...]
Timeout = Annotated[float, Meta(gt=0, le=3600)]


class ReleaseMemory(msgspec.Struct, frozen=True, kw_only=True, tag="release_memory", forbid_unknown_fields=True):
    """Release the memory of these tags to the machine, without tags all of it. Requests wait until all of it is
    resumed."""

    tags: Tags = ()


class ResumeMemory(msgspec.Struct, frozen=True, kw_only=True, tag="resume_memory", forbid_unknown_fields=True):
    """Allocate the memory of these tags again, without tags all of it; several commands may each resume some."""

    tags: Tags = ()


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause", forbid_unknown_fields=True):
    """Pause the engine. Running requests stay in place (keep), return to the queue (retract), are ended (abort), or
    finish first (drain).

    A kept request keeps its KV; a retracted one frees it and computes it again; both resume at `Continue`. A drain that
    takes longer than `timeout_s` is a conflict, and nothing has changed. The worker drains by itself: an engine never
    gets that mode.
    """

    mode: Literal["abort", "retract", "keep", "drain"] = "keep"
    timeout_s: Timeout = 60.0


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag="continue", forbid_unknown_fields=True):
    """Continue after a pause."""


class ClearCache(msgspec.Struct, frozen=True, kw_only=True, tag="clear_cache", forbid_unknown_fields=True):
    """Clear the prefix cache: free every KV block that could be reused."""


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile", forbid_unknown_fields=True):
    """Start a profile of the engine. It stops by itself after `steps` steps, if given."""

    directory: Name
    steps: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile", forbid_unknown_fields=True):
    """Stop the profile and write it to disk."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor, by its name in the model's files."""

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
    """Weights that rank 0 of a process group broadcasts, tensor by tensor in this order, all within `timeout_s`."""

    group: Name
    tensors: tuple[TensorSpec, ...]
    timeout_s: Timeout = 60.0


class FromIpc(msgspec.Struct, frozen=True, kw_only=True, tag="ipc", forbid_unknown_fields=True):
    """Weights in GPU memory of another process of this machine: one handle of the engine's own format per device."""

    handles: dict[Name, Name]


WeightSource = FromDisk | FromTensors | FromSharedMemory | FromGroup | FromIpc


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag="update_weights", forbid_unknown_fields=True):
    """Update the weights, all or none. Running requests are retracted and resume with the new weights."""

    source: WeightSource
    version: Name


class SetWeightVersion(msgspec.Struct, frozen=True, kw_only=True, tag="set_weight_version", forbid_unknown_fields=True):
    """Set the version of the current weights; running requests are not affected."""

    version: Name


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join_group", forbid_unknown_fields=True):
    """Join the process group of a weight update; returns when every rank has joined.

    Rank 0 sends the weights, and runs the rendezvous at `host` and `port`.
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
    """Start to count the tokens that each expert gets."""


class StopExpertRecord(msgspec.Struct, frozen=True, kw_only=True, tag="stop_expert_record", forbid_unknown_fields=True):
    """Stop counting; the counts are kept."""


class DumpExpertRecord(msgspec.Struct, frozen=True, kw_only=True, tag="dump_expert_record", forbid_unknown_fields=True):
    """Write the counts to disk; the outcome has the path."""


class LoadLora(msgspec.Struct, frozen=True, kw_only=True, tag="load_lora", forbid_unknown_fields=True):
    """Load the LoRA adapter in a directory, under the name that requests use. A name in use is refused."""

    name: Name
    path: Name


class UnloadLora(msgspec.Struct, frozen=True, kw_only=True, tag="unload_lora", forbid_unknown_fields=True):
    """Unload a LoRA adapter, once the requests that use it have ended."""

    name: Name


class ListLoras(msgspec.Struct, frozen=True, kw_only=True, tag="list_loras", forbid_unknown_fields=True):
    """List the LoRA adapters that are loaded."""


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
    """The outcome of a command; only the fields that it concerns are set.

    `path`: where a profile or a record is, or will be. `requests`: how many requests the command affected. After the
    command: `released` are the memory tags that are released, `paused` is whether an operator's pause holds, `adapters`
    are the LoRA adapters that are loaded.
    """

    message: str
    weight_version: str | None = None
    path: str | None = None
    requests: int | None = None
    released: tuple[str, ...] | None = None
    paused: bool | None = None
    adapters: tuple[str, ...] | None = None
