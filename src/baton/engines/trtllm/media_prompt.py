"""Prompts with media, as the library takes them: decoded files, embedding rows, or text beside handles.

The prompts of the library's own server are text. For models that need it the library decodes tokens to text and
tokenises that again, and for handles and embeddings it takes text only. A placeholder that a client has typed would
become a placeholder again on this way, so its characters are separated: placeholders are decided by position, here as
in the handlers.
"""

import re
import tempfile
from collections.abc import Collection, Sequence

from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import PromptFields
from baton.errors import InvalidRequest, Unsupported
from baton.media.images import decode_image
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import MediaInfo, Placeholder
from baton.protocol.media import Media, MediaEmbedding, MediaFile, MediaHandles

# Invisible, and no line break is allowed at it. It is part of no placeholder.
SEPARATOR = "\u2060"


class MediaPrompts:
    """Builds prompts with media for one engine or encoder. `info` is None if the model takes text only."""

    def __init__(self, library: Library, tokenizer: HubTokenizer, info: MediaInfo | None) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._info = info
        self._placeholders = dict(info.placeholders) if info is not None else {}

    def check(self, media: Sequence[Media]) -> None:
        """Refuse what the library cannot take, or the model. Raises InvalidRequest or Unsupported."""
        if len({type(item) for item in media}) > 1:
            raise Unsupported("media: TensorRT-LLM takes files, embeddings or handles, and not several of them")
        if isinstance(media[0], MediaHandles):
            return
        if not self._library.features.preprocessing:
            raise Unsupported(
                f"multi_modal_data: TensorRT-LLM {self._library.features.version} blocks the worker while it"
                " preprocesses media; use 1.3, or an encode worker"
            )
        for item in media:
            if isinstance(item, MediaEmbedding):
                self._check_embedding(item)

    def build(self, token_ids: Sequence[int], media: Sequence[Media]) -> PromptFields:
        """Return the prompt. Slow: decodes files. Raises InvalidRequest, naming the place in the request."""
        embeddings = sorted(
            (item for item in media if isinstance(item, MediaEmbedding)), key=lambda item: item.position
        )
        files = [item for item in media if isinstance(item, MediaFile)]
        if embeddings:
            return self._with_embeddings(token_ids, embeddings)
        if files:
            return self._with_files(token_ids, files)
        # The library finds the positions of handles in the text.
        return {"prompt": self._text(token_ids)[0], "prompt_token_ids": list(token_ids)}

    def _with_files(self, token_ids: Sequence[int], files: Sequence[MediaFile]) -> PromptFields:
        decoded: dict[str, list[object]] = {}
        for file in files:
            decoded.setdefault(file.modality, []).append(self._decode(file))
        for modality, items in decoded.items():
            self._check_count(token_ids, modality, len(items))
        text, has_typed = self._text(token_ids)
        fields: PromptFields = {"multi_modal_data": decoded, "mm_processor_kwargs": {}}
        if has_typed:
            fields["prompt"] = text
        else:
            fields["prompt_token_ids"] = list(token_ids)
        return fields

    def _with_embeddings(self, token_ids: Sequence[int], embeddings: Sequence[MediaEmbedding]) -> PromptFields:
        """The library expands placeholders itself: each expansion becomes a placeholder again."""
        tokens: list[int] = []
        rows: list[object] = []
        done = 0
        for embedding in embeddings:
            tokens += token_ids[done : embedding.position]
            tokens.append(self._placeholder(embedding.modality).token)
            done = embedding.position + embedding.item.prompt_tokens
            rows.append(self._rows(embedding))
        tokens += token_ids[done:]
        return {
            "prompt": self._text(tokens)[0],
            "multi_modal_embeddings": {"image": rows},
            "mm_processor_kwargs": {},
        }

    def _decode(self, file: MediaFile) -> object:
        if file.modality == "image":
            return decode_image(file)
        if file.modality != "video":
            raise Unsupported(f"{file.place}: TensorRT-LLM takes images and videos, and not {file.modality}")
        with tempfile.NamedTemporaryFile(suffix=".video") as copy:
            copy.write(file.data)
            copy.flush()
            try:
                return self._library.load_video()(video=copy.name)
            except Exception as error:
                raise InvalidRequest(f"{file.place}: cannot read the video: {error}") from error

    def _rows(self, embedding: MediaEmbedding) -> object:
        assert embedding.data is not None
        return self._library.rows(embedding.data, embedding.dtype, embedding.size)

    def _check_embedding(self, embedding: MediaEmbedding) -> None:
        if self._info is None or embedding.modality != "image":
            raise Unsupported(f"media: this model takes no embeddings of type {embedding.modality}")
        self._placeholder(embedding.modality)
        shape = self._info.shape
        if (embedding.dtype, embedding.size) != (shape.dtype, shape.size):
            raise InvalidRequest(
                f"media: rows of {embedding.size} numbers of type {embedding.dtype} do not fit this model, which takes"
                f" {shape.size} of type {shape.dtype}"
            )
        held = 0 if embedding.data is None else embedding.data.nbytes
        expected = embedding.item.rows * embedding.size * (4 if embedding.dtype == "float32" else 2)
        if held != expected:
            raise InvalidRequest(f"media: {held} bytes are not {embedding.item.rows} rows; those have {expected}")

    def _placeholder(self, modality: str) -> Placeholder:
        if modality not in self._placeholders:
            raise Unsupported(f"media: the chat template of this model has no placeholder for type {modality}")
        return self._placeholders[modality]

    def _check_count(self, token_ids: Sequence[int], modality: str, count: int) -> None:
        placeholder = self._placeholders.get(modality)
        if placeholder is not None and (found := list(token_ids).count(placeholder.token)) != count:
            raise InvalidRequest(
                f"multi_modal_data: the prompt has {found} placeholders {placeholder.text!r} for {count} items of type"
                f" {modality}"
            )

    def _text(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        return prompt_text(self._tokenizer, token_ids, self._placeholders.values())


def prompt_text(
    tokenizer: HubTokenizer, token_ids: Sequence[int], placeholders: Collection[Placeholder]
) -> tuple[str, bool]:
    """Return the text of a prompt in which only the placeholder tokens read as placeholders, and whether others did."""
    text = tokenizer.decode(token_ids)
    if not placeholders:
        return text, False
    tokens = {placeholder.token for placeholder in placeholders}
    indexes = [index for index, token in enumerate(token_ids) if token in tokens]
    pattern = re.compile("|".join(re.escape(placeholder.text) for placeholder in placeholders))
    if len(pattern.findall(text)) == len(indexes):
        return text, False
    starts = {len(tokenizer.decode(token_ids[:index])) for index in indexes}

    def separated(match: re.Match[str]) -> str:
        found = match.group()
        return found if match.start() in starts else found[:1] + SEPARATOR + found[1:]

    return pattern.sub(separated, text), True
