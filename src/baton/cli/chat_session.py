"""The conversation of `baton chat`: its messages, images for the next one, and the options of requests."""

import base64
import mimetypes
from pathlib import Path

from baton.cli.chat_client import Json

MAX_IMAGE_BYTES = 20 << 20


class Conversation:
    """Messages so far. A question becomes part of it with its answer, so that one that failed can be asked again."""

    def __init__(self, model: str, system: str, options: Json) -> None:
        self.model = model
        self.system = system
        self._options = options
        self._messages: list[Json] = []
        self._images: list[Json] = []

    @property
    def pending_images(self) -> int:
        """The number of images that go with the next message."""
        return len(self._images)

    def attach(self, path: str) -> None:
        """Send an image with the next message: a file, or a URL that the server fetches. Raises OSError, ValueError."""
        self._images.append({"type": "image_url", "image_url": {"url": _image_url(path)}})

    def clear(self) -> None:
        """Forget all messages and images. The system prompt stays."""
        self._messages.clear()
        self._images.clear()

    def request(self, text: str) -> Json:
        """Return the body of a request with `text` as the next message."""
        system: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *self._messages, self._question(text)], **self._options}

    def add(self, text: str, answer: str) -> None:
        """Add a message and its answer, which may have been stopped."""
        self._messages += [self._question(text), {"role": "assistant", "content": answer}]
        self._images.clear()

    def _question(self, text: str) -> Json:
        content: object = [*self._images, {"type": "text", "text": text}] if self._images else text
        return {"role": "user", "content": content}


def _image_url(path: str) -> str:
    if path.startswith(("http://", "https://", "data:")):
        return path
    file = Path(path).expanduser()
    if file.stat().st_size > MAX_IMAGE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_IMAGE_BYTES >> 20} MiB")
    kind = mimetypes.guess_type(file.name)[0] or ""
    if not kind.startswith("image/"):
        raise ValueError(f"{path} is not an image by its name: use .png, .jpg, .webp or .gif")
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
