"""The double's encoder: images become handles of shared tensors, which its world counts."""

import hashlib
import itertools
import threading
from pathlib import Path
from typing import Any

from baton.models.directory import read_config
from tests.doubles.trtllm.processor import Processor, patches_of
from tests.doubles.trtllm.world import World
from tests.doubles.trtllm_facts import Bound


class EncodeState:
    """Behind a `Bound`: one request. It holds its embeddings until it is deleted."""

    def __init__(self, number: int, prompt: list[int], world: World) -> None:
        self.request_id = self.id = number
        self.prompt_token_ids = prompt
        self.disaggregated_params: Any = None
        self.error: Exception | None = None
        self.names: list[str] = []
        self.over = threading.Event()
        self._world = world
        self._aborted = False

    def abort(self) -> None:
        """Ask the engine to end it."""
        self._aborted = True

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def result(self, timeout: float | None = None) -> "EncodeState":
        """Block until it has ended. Raises what it failed with."""
        self.over.wait(timeout)
        if self.error is not None:
            raise self.error
        return self

    def __del__(self) -> None:
        self._world.drop(self.names)


class EncoderState:
    """Behind a `Bound`. `generate_async` may be called on any thread."""

    def __init__(self, classes: Any, world: World, arguments: dict[str, Any]) -> None:
        read_config(Path(arguments["model"]))
        self.over = False
        self._classes = classes
        self._world = world
        self._processor = Processor(Path(arguments["model"]), world, classes.facts)
        self._socket = threading.Lock()
        self._numbers = itertools.count(1)
        self._executor: Bound | None = Bound(_Executor(self), classes.facts, "executor.executor.GenerationExecutor")

    def preprocess(self, inputs: dict[str, Any], sampling_params: Any = None, disaggregated_params: Any = None) -> Any:
        """Preprocess the images of a prompt."""
        assert not sampling_params.add_special_tokens, "the prompt has its special tokens already"
        made = self._processor.preprocess(inputs, disaggregated_params)
        made.multimodal_params._bound_inner.images = inputs["multi_modal_data"]["image"]
        return made

    def generate_async(self, inputs: Any, sampling_params: object = None) -> Bound:
        """Accept a request."""
        if self.over:
            raise RuntimeError("LLM is shutting down")
        assert self._socket.acquire(blocking=False), "two threads use the socket of the encoder"
        try:
            if isinstance(inputs, dict):
                self._processor.expand(inputs, None)
                if self._world.processor_broken:
                    raise ValueError("the image processor is broken")
                prompt, images = inputs.get("prompt_token_ids", [0]), inputs["multi_modal_data"]["image"]
            else:
                media = inputs.multimodal_params._bound_inner
                prompt, images = inputs.prompt_token_ids, media.images
                media.to_tensor("multimodal_data")
        finally:
            self._socket.release()
        state = EncodeState(next(self._numbers), prompt, self._world)
        threading.Thread(target=self._encode, args=(state, images), name="trtllm-double-encode", daemon=True).start()
        return Bound(state, self._classes.facts, "llmapi.llm.RequestOutput")

    def shutdown(self) -> None:
        """Shut down."""
        self.over = True
        self._world.encode_gate.set()
        self._executor = None

    def _encode(self, state: EncodeState, images: list[Any]) -> None:
        self._world.encode_gate.wait()
        fault = self._world.fail_prompts.get(state.prompt_token_ids[0])
        if fault == "die":
            self.over = True
            state.error = self._classes.dead_error()
        elif fault is not None:
            state.error = self._classes.request_error("the engine failed it")
        elif not state.aborted() or self._world.encodes_aborted:
            self._share(state, images)
        state.over.set()

    def _share(self, state: EncodeState, images: list[Any]) -> None:
        state.names = [self._world.share(image.tobytes()) for image in images]
        state.disaggregated_params = self._classes.disaggregated(
            multimodal_embedding_handles=[
                {"method_key": 1, "storage_handle": name, "tensor_size": [patches_of(image), 8]}
                for name, image in zip(state.names, images, strict=True)
            ],
            multimodal_hashes=[list(hashlib.sha256(image.tobytes()).digest()[:8]) for image in images],
            mrope_position_ids_handle={"method_key": 2, "storage_handle": "positions"},
            mrope_position_deltas_handle={"method_key": 2, "storage_handle": "deltas"},
        )

    def _check_health(self) -> bool:
        return not (self.over or self._world.unhealthy)


class _Executor:
    def __init__(self, encoder: EncoderState) -> None:
        self._encoder = encoder

    def is_shutdown(self) -> bool:
        return self._encoder.over


class SharedTensors:
    """The class of shared tensors, in one world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def from_dict(self, tensor_info: dict[str, Any]) -> "_SharedTensor":
        """Return the tensor of a handle."""
        return _SharedTensor(self._world, tensor_info["storage_handle"])


class _SharedTensor:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def get_local_view(self) -> bytes:
        """Open it. Raises RuntimeError, as CUDA does, for memory that has been freed."""
        return self._world.read(self._name)
