"""New weights for a running SGLang: from disk, tensors, shared memory, a process group or CUDA IPC handles."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from baton.engines.sglang.pause import PauseCommands
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.weights import Shapes, check_directory, check_specs, shapes_in, tensors_of
from baton.errors import EngineDead, EngineFailed, InvalidRequest
from baton.protocol.commands import (
    FromDisk,
    FromGroup,
    FromIpc,
    FromSharedMemory,
    FromTensors,
    JoinGroup,
    LeaveGroup,
    Outcome,
    SetWeightVersion,
    UpdateWeights,
    WeightSource,
)

Answer = tuple[bool, str]


class WeightCommands:
    """Replaces weights between two steps. Weights that do not fit the model are refused before any is replaced."""

    def __init__(
        self, manager: Manager, pause: PauseCommands, model_dir: Path, tp_size: int, group_backend: str
    ) -> None:
        self._manager = manager
        self._pause = pause
        self._model_dir = model_dir
        self._tp_size = tp_size
        self._backend = group_backend
        self._shapes: Shapes | None = None
        self._group: str | None = None

    async def execute(self, command: UpdateWeights | SetWeightVersion | JoinGroup | LeaveGroup) -> Outcome:
        """See `Engine.execute`."""
        match command:
            case UpdateWeights():
                return await self._update(command)
            case SetWeightVersion():
                return await self._set_version(command.version)
            case JoinGroup():
                return await self._join(command)
            case LeaveGroup():
                return await self._leave(command.group)

    async def _update(self, command: UpdateWeights) -> Outcome:
        await asyncio.to_thread(self._check, command.source)
        async with self._pause.between_steps():
            success, message = await self._send(command.source, command.version)
        if not success and isinstance(command.source, FromGroup):
            await self._leave(command.source.group)
            raise EngineFailed(f"{message}; this worker has left the group, join again on both sides")
        if not success:
            raise InvalidRequest(message)
        return Outcome(message=message, weight_version=command.version)

    def _check(self, source: WeightSource) -> None:
        """Raise InvalidRequest for what does not fit; reads files."""
        if self._shapes is None:
            self._shapes = shapes_in(self._model_dir)
        match source:
            case FromDisk():
                check_directory(Path(source.path).expanduser(), self._shapes)
            case FromGroup() if source.group != self._group:
                raise InvalidRequest(f"group: not in {source.group!r}; join it first")
            case FromTensors() | FromSharedMemory() | FromGroup():
                check_specs(source.tensors, self._shapes)
            case FromIpc():
                pass  # shapes are known only after the handles are opened

    async def _send(self, source: WeightSource, version: str) -> Answer:
        from sglang.srt.managers import io_struct

        manager = self._manager
        match source:
            case FromDisk():
                disk = io_struct.UpdateWeightFromDiskReqInput(model_path=_expanded(source.path), weight_version=version)
                success, message, *_ = await manager.update_weights_from_disk(disk, None)
                return success, message
            case FromIpc():
                ipc = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles=dict(source.handles), weight_version=version)
                success, message = await manager.update_weights_from_ipc(ipc, None)
                manager.initial_weights_loaded |= success
                return success, message
            case FromGroup():
                group = io_struct.UpdateWeightsFromDistributedReqInput(
                    names=[spec.name for spec in source.tensors],
                    dtypes=[spec.dtype for spec in source.tensors],
                    shapes=[list(spec.shape) for spec in source.tensors],
                    group_name=source.group,
                    weight_version=version,
                )

                def receive() -> Coroutine[Any, Any, Answer]:
                    receiving = manager.update_weights_from_distributed(group, None)
                    return _or_restart(receiving, source.timeout_s, "sent its weights")

                return await self._in_session(receive)
            case FromTensors() | FromSharedMemory():
                payload = await asyncio.to_thread(self._serialized, source)
                tensors = io_struct.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=payload, weight_version=version
                )
                return await self._in_session(lambda: manager.update_weights_from_tensor(tensors, None))

    async def _in_session(self, put: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Run `put` inside one of SGLang's weight-update sessions. An open session would refuse later updates."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        begun, message = await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None)
        if not begun:
            return begun, message
        try:
            success, message = await put()
        except EngineDead:
            raise  # SGLang's scheduler waits for the trainer, and would not answer
        except Exception:
            await self._manager.end_weight_update(EndWeightUpdateReqInput(), None)
            raise
        ended, problem = await self._manager.end_weight_update(EndWeightUpdateReqInput(), None)
        return success and ended, message if ended else problem

    def _serialized(self, source: FromTensors | FromSharedMemory) -> list[bytes]:
        from sglang.srt.utils import MultiprocessingSerializer

        named = tensors_of(source)
        return [MultiprocessingSerializer.serialize(named) for _ in range(self._tp_size)]

    async def _set_version(self, version: str) -> Outcome:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        # By default SGLang aborts every request for it.
        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._manager.update_weight_version(request)
        return Outcome(message=f"the weights are {version}", weight_version=version)

    async def _join(self, command: JoinGroup) -> Outcome:
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        if self._group is not None:
            raise InvalidRequest(f"group: already in {self._group!r}; leave it first")
        if command.rank >= command.size:
            raise InvalidRequest(f"rank: a group of {command.size} has no rank {command.rank}")
        request = InitWeightsUpdateGroupReqInput(
            master_address=command.host,
            master_port=command.port,
            rank_offset=command.rank,
            world_size=command.size,
            group_name=command.group,
            backend=self._backend,
        )
        joining = self._manager.init_weights_update_group(request, None)
        success, message = await _or_restart(joining, command.timeout_s, f"joined {command.group}")
        if not success:
            raise EngineFailed(message)
        self._group = command.group
        return Outcome(message=f"joined {command.group}")

    async def _leave(self, group: str) -> Outcome:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        if self._group != group:
            raise InvalidRequest(f"group: not in {group!r}")
        request = DestroyWeightsUpdateGroupReqInput(group_name=group)
        success, message = await self._manager.destroy_weights_update_group(request, None)
        if not success:
            raise EngineFailed(message)
        self._group = None
        return Outcome(message=f"left {group}")


async def _or_restart(answer: Coroutine[Any, Any, Answer], timeout_s: float, expected: str) -> Answer:
    """Return SGLang's answer, which depends on the trainer. Raises EngineDead if the trainer keeps it waiting."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise EngineDead(
            f"the trainer has not {expected} within {timeout_s:g} s, and SGLang cannot stop waiting for it: this worker"
            " restarts with the weights of its model directory"
        ) from None


def _expanded(path: str) -> str:
    return str(Path(path).expanduser())
