"""A model directory with placeholders for images and videos, for engines that are doubles: there are no weights."""

import json
import shutil
from pathlib import Path

from baton.engines.echo.engine import MODEL_DIR

IMAGE, VIDEO = 258, 259
PLACEHOLDERS = {"<|image|>": IMAGE, "<|video|>": VIDEO}
ROW_SIZE = 16
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|image|>"
    "{% elif part.type in ('video', 'video_url') %}<|video|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def make_vision_chat_model(directory: Path, template: str = TEMPLATE) -> Path:
    """Write the model to `directory`, which must not exist, and return it."""
    shutil.copytree(MODEL_DIR, directory)
    _change(
        directory / "config.json",
        vocab_size=256 + 2 + len(PLACEHOLDERS),
        max_position_embeddings=4096,
        vision_config={"hidden_size": 8},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    _change(directory / "tokenizer_config.json", chat_template=template)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": token, "content": text, **kind} for text, token in PLACEHOLDERS.items()]
    _change(directory / "tokenizer.json", added_tokens=tokenizer["added_tokens"] + added)
    return directory


def _change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
