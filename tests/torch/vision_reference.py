"""Prompts with media for the tiny vision-language models, and what a plain transformers forward generates for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from baton.ports.engine import Work
from baton.protocol.ids import new_request_id
from baton.protocol.media import EncodedItem, MediaEmbedding
from baton.protocol.requests import Sampling, StopConditions
from tests.vision_models import special_token

TOKENS = 20


class Picture(NamedTuple):
    """Pixels as a processor prepares them; `grid` for Qwen2.5-VL, in patches, and `seconds` for a video."""

    seed: int
    grid: tuple[int, int, int] | None = None
    seconds: float | None = None

    @property
    def modality(self) -> str:
        return "image" if self.seconds is None else "video"


class Prompt(NamedTuple):
    """A prompt in its expanded form, and its media."""

    token_ids: tuple[int, ...]
    media: tuple[MediaEmbedding, ...]
    pictures: tuple[Picture, ...]

    def work(self, tokens: int = TOKENS, rows: bool = True, **options: Any) -> Work:
        media = self.media if rows else tuple(_without_rows(item) for item in self.media)
        return Work(
            request_id=new_request_id("media"),
            token_ids=self.token_ids,
            media=media,
            max_tokens=tokens,
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=Sampling(temperature=0.0),
            **options,
        )


def _without_rows(item: MediaEmbedding) -> MediaEmbedding:
    return MediaEmbedding(item=item.item, position=item.position, dtype=item.dtype, size=item.size)


class Idefics3Reference:
    """A tiny Idefics3 model in transformers. A picture is one frame of 16 rows between two markers."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = transformers.Idefics3ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None
        self.image = special_token("idefics3", "<image>")
        around = special_token("idefics3", "<fake_token_around_image>")
        self._expansion = ((around, 1), (special_token("idefics3", "<global-img>"), 1), (self.image, 16), (around, 1))

    def prompt(self, *pieces: Sequence[int] | Picture) -> Prompt:
        return _prompt(pieces, self._encoded)

    def tokens(self, prompt: Prompt) -> list[int]:
        pixels = torch.cat([_pixels(picture) for picture in prompt.pictures]).unsqueeze(0)
        inputs = torch.tensor([prompt.token_ids])
        out = self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            pixel_values=pixels,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(prompt.token_ids) :]]

    def _encoded(self, picture: Picture) -> tuple[EncodedItem, torch.Tensor]:
        with torch.no_grad():
            rows = _rows(self.model.get_image_features(pixel_values=_pixels(picture).unsqueeze(0)))
        item = EncodedItem(
            modality="image",
            content_hash=f"picture{picture.seed}",
            expansion=self._expansion,
            embed_token=self.image,
            rows=len(rows),
        )
        return item, rows


class QwenReference:
    """A tiny Qwen2.5-VL model in transformers."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        )
        self.pads = {kind: special_token("qwen", f"<|{kind}_pad|>") for kind in ("image", "video")}

    def prompt(self, *pieces: Sequence[int] | Picture) -> Prompt:
        return _prompt(pieces, self._encoded)

    def tokens(self, prompt: Prompt, positions: torch.Tensor | None = None) -> list[int]:
        """Generate greedily; `positions` are those of the prompt, [3, tokens]."""
        if positions is None:
            positions = self.positions(prompt)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt.token_ids]), **self._inputs(prompt)}
        cache, tokens = None, []
        for _ in range(TOKENS):
            with torch.no_grad():
                out = self.model(position_ids=positions.unsqueeze(1), past_key_values=cache, use_cache=True, **inputs)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            positions = positions.max().expand(3, 1) + 1
            inputs = {"input_ids": torch.tensor([tokens[-1:]])}
        return tokens

    def positions(self, prompt: Prompt) -> torch.Tensor:
        """The positions that transformers gives the prompt."""
        inputs = {name: value for name, value in self._inputs(prompt).items() if not name.startswith("pixel")}
        kinds = torch.zeros(1, len(prompt.token_ids), dtype=torch.int64)
        for placed in prompt.media:
            end = placed.position + placed.item.prompt_tokens
            kinds[0, placed.position : end] = 1 if placed.modality == "image" else 2
        found, _ = self.model.model.get_rope_index(torch.tensor([prompt.token_ids]), mm_token_type_ids=kinds, **inputs)
        return found[:, 0]

    def _inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        inputs: dict[str, torch.Tensor] = {}
        for modality, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            pictures = [picture for picture in prompt.pictures if picture.modality == modality]
            if pictures:
                inputs[pixels] = torch.cat([_patches(picture) for picture in pictures])
                inputs[f"{modality}_grid_thw"] = torch.tensor([picture.grid for picture in pictures])
            if pictures and modality == "video":
                inputs["second_per_grid_ts"] = torch.tensor([picture.seconds for picture in pictures])
        return inputs

    def _encoded(self, picture: Picture) -> tuple[EncodedItem, torch.Tensor]:
        assert picture.grid is not None
        with torch.no_grad():
            features = getattr(self.model, f"get_{picture.modality}_features")
            rows = _rows(features(_patches(picture), torch.tensor([picture.grid])))
        item = EncodedItem(
            modality=picture.modality,
            content_hash=f"picture{picture.seed}",
            expansion=((self.pads[picture.modality], len(rows)),),
            embed_token=self.pads[picture.modality],
            rows=len(rows),
            grid=(picture.grid,),
            seconds_per_grid=picture.seconds,
        )
        return item, rows


def _prompt(pieces: Sequence[Sequence[int] | Picture], encoded: Any) -> Prompt:
    tokens: list[int] = []
    media: list[MediaEmbedding] = []
    pictures: list[Picture] = []
    for piece in pieces:
        if not isinstance(piece, Picture):
            tokens += piece
            continue
        item, rows = encoded(piece)
        data = memoryview(rows.numpy().tobytes())
        media.append(MediaEmbedding(item=item, position=len(tokens), dtype="float32", size=rows.shape[1], data=data))
        tokens += [token for token, count in item.expansion for _ in range(count)]
        pictures.append(piece)
    return Prompt(tuple(tokens), tuple(media), tuple(pictures))


def _rows(features: Any) -> torch.Tensor:
    found = features.pooler_output if hasattr(features, "pooler_output") else features
    found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return found.reshape(-1, found.shape[-1]).contiguous()


def _pixels(picture: Picture) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(picture.seed)
    return torch.randn(1, 3, 64, 64, generator=numbers)


def _patches(picture: Picture) -> torch.Tensor:
    assert picture.grid is not None
    frames, height, width = picture.grid
    numbers = torch.Generator().manual_seed(picture.seed)
    return torch.randn(frames * height * width, 3 * 2 * 14 * 14, generator=numbers)


def words(count: int, seed: int = 0) -> list[int]:
    """Return `count` tokens of text."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
