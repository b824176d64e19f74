"""Images and video on the real SGLang, as a client sees them: all in one, EP/D, E/PD and E/P/D."""

import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Serve
from tests.real_sglang.hardware import ON_GPU, SAME_ANSWERS, SERVED
from tests.real_sglang.media_prompts import FILES, Parts, tokens_of
from tests.real_sglang.media_prompts import PROMPTS as ALONE
from tests.real_sglang.test_serving import OVER_NIXL, STOP
from tests.vision_models import make_tiny_qwen25vl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "see"
CONTEXT = 256
RESERVED = 8  # tokens that SGLang keeps for itself
TYPES = {"image": "image/png", "video": "video/mp4"}
SPLIT = (*SERVED, *OVER_NIXL)
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "EP/D": (SPLIT, {"prefill": 1, "decode": 1}),
    "E/PD": (SERVED, {"encoders": 1}),
    "E/P/D": (SPLIT, {"encoders": 1, "prefill": 1, "decode": 1}),
}
PROMPTS: dict[str, Parts] = {
    **{name: ALONE[name] for name in ("one image", "images and text", "video", "images and videos") if name in ALONE},
    "a typed placeholder": ("Is <|image_pad|> in ", "@small", "?"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_qwen25vl(tmp_path_factory.mktemp("models") / MODEL, wide_heads=ON_GPU))


def started(start_shared: Callable[..., Serve], model: str, args: tuple[str, ...], **workers: int) -> Serve:
    options = ("--model", model, "--context-length", str(CONTEXT))
    options += ("--encode", "1") if "encoders" in workers else ()
    return start_shared(Serve, *options, *args, engine="sglang", settings=STOP, **workers)


def ask(serve: Serve, parts: Parts, **options: Any) -> Any:
    content: list[dict[str, Any]] = []
    for part in parts:
        if not part.startswith("@"):
            content.append({"type": "text", "text": part})
        else:
            file = FILES[part[1:]]
            url = f"data:{TYPES[file.modality]};base64,{base64.b64encode(file.data).decode()}"
            content.append({"type": f"{file.modality}_url", f"{file.modality}_url": {"url": url}})
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": content}]
    return serve.client(strict=False).chat.completions.create(model=MODEL, messages=messages, **(asked | options))


def text_of(answer: Any) -> Any:
    return answer.choices[0].message.content


@pytest.fixture(scope="module")
def answers(start_shared: Callable[..., Serve], model: str) -> dict[str, Any]:
    """What one worker answers that does everything. It has ended: few SGLangs run at the same time."""
    serve = started(start_shared, model, SERVED)
    try:
        found = {name: ask(serve, parts) for name, parts in PROMPTS.items()}
        found["unlimited"] = ask(serve, PROMPTS["one image"], max_tokens=None)
    finally:
        serve.stop()
    return found


def test_the_usage_counts_the_rows_of_media(answers: dict[str, Any]) -> None:
    template = len("user\n") + len("\n") + len("assistant\n") + 3  # and the marks of two turns
    text = sum(len(tokens_of(part)) for part in PROMPTS["one image"] if not part.startswith("@"))
    assert answers["one image"].usage.prompt_tokens == template + text + 2 + 4, "two marks, and 4 rows"
    assert answers["a typed placeholder"].usage.prompt_tokens > template + 4


def test_a_request_without_a_limit_ends_with_the_context(answers: dict[str, Any]) -> None:
    usage = answers["unlimited"].usage
    assert CONTEXT - RESERVED <= usage.total_tokens <= CONTEXT
    assert answers["unlimited"].choices[0].finish_reason == "length"


def test_answers_depend_on_the_media(answers: dict[str, Any]) -> None:
    assert len({text_of(answers[name]) for name in PROMPTS}) == len(PROMPTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_answers(
    layout: str, start_shared: Callable[..., Serve], model: str, answers: dict[str, Any]
) -> None:
    args, workers = LAYOUTS[layout]
    serve = started(start_shared, model, args, **workers)
    try:
        found = {name: ask(serve, parts) for name, parts in PROMPTS.items()}
        found["unlimited"] = ask(serve, PROMPTS["one image"], max_tokens=None)
        same = {name: text_of(found[name]) == text_of(answers[name]) for name in answers}
        assert sum(same.values()) >= SAME_ANSWERS * len(same), same
        for name, answer in found.items():
            assert answer.usage.prompt_tokens == answers[name].usage.prompt_tokens, name
        assert found["unlimited"].usage == answers["unlimited"].usage
    finally:
        serve.stop()
