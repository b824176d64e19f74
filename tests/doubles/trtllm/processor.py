"""The double's input processor: finds the placeholders of a prompt and puts one token for each patch in their place.

As the library's processors of most models it works on text: it decodes tokens and tokenises the text again.
"""

import asyncio
import itertools
import json
import zlib
from pathlib import Path
from typing import Any

from tests.doubles.trtllm.world import World
from tests.doubles.trtllm_facts import Bound, fact_class

PATCH = 16  # an image has one token for each square of this many pixels, rounded up
FRAME_TOKENS = 4


class Video:
    """What `load_video` returns."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.frames = content.count(b"frame")


def load_video(*, video: str) -> Video:
    """Decode the file of a video: each time it says "frame" is one."""
    decoded = Video(Path(video).read_bytes())
    if not decoded.frames:
        raise ValueError("no frames could be read")
    return decoded


class Rows:
    """A tensor of embedding rows."""

    def __init__(self, content: bytes, dtype: str, size: int) -> None:
        self.content = content
        self.dtype = dtype
        width = {"float32": 4, "float16": 2, "bfloat16": 2}[dtype] * size
        if len(content) % width:
            raise ValueError("the rows have another size")
        self.shape = (len(content) // width, size)


def make_rows(data: memoryview, dtype: str, size: int) -> Rows:
    """Return a copy of rows."""
    return Rows(bytes(data), dtype, size)


class _Media:
    """Behind a `Bound`: preprocessed media, in shared memory until they have been read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_shared = True
        world.prepared += 1

    def to_tensor(self, element: str) -> None:
        assert element == "multimodal_data"
        assert self.is_shared, "shared tensors are read once"
        self.is_shared = False
        self._world.prepared -= 1


class Processor:
    """Preprocesses the prompts of one model."""

    def __init__(self, model_dir: Path, world: World, facts: Any) -> None:
        from baton.models.tokenizer import HubTokenizer  # the library has a tokenizer of its own

        self._world = world
        self._facts = facts
        self._tokenizer = HubTokenizer(model_dir)
        config = json.loads((model_dir / "config.json").read_text())
        names = {"image": "image_token_id", "video": "video_token_id"}
        self._tokens = {kind: config[name] for kind, name in names.items() if name in config}

    def preprocess(self, inputs: dict[str, Any], params: Any) -> Any:
        """Return PreprocessedInputs. Slow, so never on an event loop."""
        assert not _on_event_loop(), "preprocessing blocks the event loop"
        self._world.preprocess_gate.wait()
        if self._world.processor_broken:
            raise ValueError("the image processor is broken")
        expanded = self.expand(inputs, params)
        self._world.preprocessed.append("text" if inputs.get("prompt") else "tokens")
        if params is not None and inputs.get("multi_modal_data"):
            params.mrope_position_ids_handle = {"method_key": 2, "storage_handle": "positions"}
            params.mrope_position_deltas_handle = {"method_key": 2, "storage_handle": "deltas"}
        media = Bound(_Media(self._world), self._facts, "inputs.multimodal.MultimodalParams")
        made = fact_class(self._facts, "llmapi.llm.PreprocessedInputs")
        return made(prompt_token_ids=expanded, multimodal_params=media)

    def expand(self, inputs: dict[str, Any], params: Any) -> list[int]:
        """Return the prompt as it is computed: with a token for each patch of its media, which are read now."""
        handles = None if params is None else params.multimodal_embedding_handles
        if handles is not None:
            if params.request_type == "generation_only":
                raise ValueError("Generation-only mode should not need multimodal parameters")
            if not inputs.get("prompt"):
                raise ValueError("Text prompt is required but not provided")
            patches = [
                [token_of(self._world.read(handle["storage_handle"]))] * handle["tensor_size"][0] for handle in handles
            ]
            return self._place(self._tokenizer.encode(inputs["prompt"]), {"image": patches})
        if inputs.get("multi_modal_embeddings"):
            if set(inputs["multi_modal_embeddings"]) != {"image"}:
                raise ValueError("Only image modality is supported for external multimodal embedding")
            rows = inputs["multi_modal_embeddings"]["image"]
            patches = [[token_of(each.content)] * each.shape[0] for each in rows]
            return self._place(self._tokenizer.encode(inputs["prompt"]), {"image": patches})
        return self._place(self._prompt_tokens(inputs), self._patches(inputs["multi_modal_data"]))

    def _prompt_tokens(self, inputs: dict[str, Any]) -> list[int]:
        if inputs.get("prompt"):
            return self._tokenizer.encode(inputs["prompt"])
        tokens: list[int] = inputs["prompt_token_ids"]
        return tokens if self._world.expands_tokens else self._tokenizer.encode(self._tokenizer.decode(tokens))

    def _patches(self, data: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        if not any(data.values()):
            raise ValueError("there is no image to encode")
        if any(image.mode != "RGB" for image in data.get("image", ())):
            raise TypeError("images are expected in RGB")
        images = [[token_of(image.tobytes())] * patches_of(image) for image in data.get("image", ())]
        videos = [[token_of(video.content)] * FRAME_TOKENS * video.frames for video in data.get("video", ())]
        return {"image": images, "video": videos}

    def _place(self, tokens: list[int], patches: dict[str, list[list[int]]]) -> list[int]:
        if not self._tokens:
            return [*tokens, *itertools.chain.from_iterable(patches["image"])]
        for kind, token in self._tokens.items():
            if tokens.count(token) != len(patches.get(kind, ())):
                raise AssertionError("Number of images must match number of placeholders")
        queues = {token: iter(patches.get(kind, ())) for kind, token in self._tokens.items()}
        return [each for token in tokens for each in (next(queues[token]) if token in queues else (token,))]


def token_of(content: bytes) -> int:
    """Return the token that stands for every patch of an item with this content."""
    return 1 + zlib.crc32(content) % 200


def patches_of(image: Any) -> int:
    """Return how many tokens an image has."""
    return int(-(-image.width // PATCH) * -(-image.height // PATCH))


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
