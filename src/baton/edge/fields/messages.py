"""The messages of a chat: roles, the parts of a content, tool calls. The frontend drops other keys of a message.

`cache_control` is a hint for the caches of other services, which clients send along. Parts may have such hints too.
"""

from typing import Literal

import msgspec


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal of the model in an earlier turn."""

    refusal: str


class MediaUrl(msgspec.Struct):
    """Where media are: an http(s) address, or a data: URL."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    uuid: str | None = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image."""

    image_url: MediaUrl


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    """A video."""

    video_url: MediaUrl


class AudioUrlPart(msgspec.Struct, tag_field="type", tag="audio_url"):
    """Audio."""

    audio_url: MediaUrl


class InputAudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """Audio in OpenAI's format."""

    input_audio: dict[str, object]


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """A file."""

    file: dict[str, object]


UserPart = TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart | FilePart


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    """Instructions. Some templates take tools here instead of a content."""

    content: str | list[TextPart] | None = None
    name: str | None = None
    tools: list[dict[str, object]] | None = None
    cache_control: object = None


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", forbid_unknown_fields=True):
    """Instructions, by their newer name."""

    content: str | list[TextPart]
    name: str | None = None
    cache_control: object = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    """What the user says."""

    content: str | list[UserPart]
    name: str | None = None
    cache_control: object = None


class CalledFunction(msgspec.Struct):
    """A function with its arguments: JSON in a string, or the object itself."""

    name: str
    arguments: str | dict[str, object]


class ToolCall(msgspec.Struct):
    """One call that the model has made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    """What the model has said. It has the fields of an answer, so that clients can send answers back."""

    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | list[str] | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    annotations: list[object] | None = None
    audio: object = None
    cache_control: object = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """The result of a tool call."""

    content: str | list[TextPart | ImagePart | VideoPart | AudioUrlPart]
    tool_call_id: str
    name: str | None = None
    cache_control: object = None


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function", forbid_unknown_fields=True):
    """The result of a function, by the older name of tools."""

    name: str
    content: str | None = None
    cache_control: object = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
