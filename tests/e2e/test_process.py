"""Process workers over HTTP: text in front of language workers, next to a frontend that calls the same workers."""

import base64
import io
import json
import shutil
import signal
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from baton.engines.echo.engine import VISION_MODEL_DIR
from tests.e2e.harness import START_S, Process, Serve, System, assert_unbroken, error_in, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LANGUAGE, ENCODES, PROCESSES = (0, 1), 2, 3
# The frontend's template language does not format with %.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ '%s;' % tool.function.name }}{% endfor %}{{ mood or '' }}"
    "{% for message in messages %}{{ '%s:' % message.role[0] }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)


class Direct(System):
    """A frontend that finds the language workers of a `baton serve` with process workers."""

    def __init__(self, directory: Path, discovery: Path, engine: str) -> None:
        super().__init__(directory, 0, engine)
        flags = ["--port", str(self.port), "--namespace", "baton-language", "--runtime-directory", str(discovery)]
        self.process = Process(["frontend", *flags], directory / "direct.log")
        running.append(self)

    def wait_ready(self) -> None:
        """See `System.wait_ready`."""
        eventually(self.is_ready, START_S, "the model is listed")
        model = json.loads(self.get("/v1/models")[1])["data"][0]["id"]
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        # docs/known-issues.md: for a moment it has not connected to the workers that it lists.
        eventually(lambda: self.post(COMPLETIONS, body)[0] == 200, START_S, "a request is answered")

    def close(self) -> None:
        """See `System.close`."""
        self.process.kill()
        running.remove(self)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the echo engine that has placeholders of images, with a template that the frontend cannot apply."""
    directory = tmp_path_factory.mktemp("models") / "echo"
    shutil.copytree(VISION_MODEL_DIR, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def discovery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("discovery")


@pytest.fixture(scope="module")
def front(start_shared: Callable[..., Serve], model: Path, discovery: Path) -> Iterator[Serve]:
    """Two language workers, an encode worker and a process worker."""
    flags = ("--model", str(model), "--runtime-directory", str(discovery), "--encode", "1", "--process", "1")
    echo = ("--router", "kv", "--echo-media", "--echo-faults", "--echo-pace-ms", "2", "--canary-interval-s", "1")
    serve = start_shared(Serve, *flags, *echo, workers=2, encoders=1, processors=1)
    eventually(lambda: ask(serve, [picture(1, 1)])[0] == 200 and encoded(serve) > 0, what="images are encoded")
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def direct(start_shared: Callable[..., System], front: Serve, discovery: Path) -> System:
    return start_shared(Direct, discovery, "echo")


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


def picture(width: int, height: int) -> dict[str, object]:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask(system: System, content: object, **options: object) -> tuple[int, str]:
    messages = [{"role": "user", "content": content}]
    return system.post(CHAT, {"model": "echo", "messages": messages, "max_tokens": 20, **options})


def encoded(front: Serve) -> float:
    return front.ended("completed", ENCODES, role="encode")


def in_flight(front: Serve) -> list[float]:
    return [front.load(worker)["in_flight"] for worker in (*LANGUAGE, PROCESSES)]


def test_a_template_that_the_frontend_cannot_apply_is_applied(front: Serve, direct: System) -> None:
    status, answer = ask(direct, "hello")
    assert status >= 400, answer
    status, answer = ask(front, "hello", max_tokens=8)
    assert status == 200, answer
    assert json.loads(answer)["choices"][0]["message"]["content"] == "u:hello|"


def test_d22_d24_turns_with_texts_and_parts_mixed_and_several_images(front: Serve) -> None:
    before = encoded(front)
    messages: list[Any] = [
        {"role": "system", "content": [text("be"), text("short")]},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [text("hi")]},
        {"role": "user", "content": [picture(30, 20), text("and"), picture(7, 9), text("?")]},
    ]
    answer = front.client().chat.completions.create(model="echo", messages=messages, max_tokens=120)
    content = answer.choices[0].message.content or ""
    assert "s:be\nshort|u:hello|a:hi|u:" in content
    assert content.index("30x20") < content.index("7x9")
    assert encoded(front) == before + 1


def test_the_official_client_gets_the_same_as_from_the_language_workers(front: Serve, direct: System) -> None:
    answers = []
    for system in (front, direct):
        completions = system.client(strict=False).completions  # its schema has no stream of completions
        whole = completions.create(model="echo", prompt="héllo → 你好", max_tokens=40, n=2, logprobs=2, seed=1)
        parts = list(completions.create(model="echo", prompt="héllo → 你好", max_tokens=40, stream=True))
        streamed = "".join(choice.text for part in parts for choice in part.choices)
        assert streamed == whole.choices[0].text
        assert "�" not in streamed
        assert whole.usage is not None
        logprobs = [choice.logprobs for choice in whole.choices if choice.logprobs is not None]
        answers.append(
            (
                [(choice.text, choice.finish_reason) for choice in whole.choices],
                [(each.tokens, each.token_logprobs, each.top_logprobs) for each in logprobs],
                (whole.usage.prompt_tokens, whole.usage.completion_tokens),
            )
        )
    assert len(answers[0][1]) == 2
    assert answers[0] == answers[1]


def test_usage_of_a_chat_with_images_is_what_the_language_workers_count(front: Serve) -> None:
    asked = [text("see"), picture(30, 20)]
    stream = front.client().chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": asked}],  # type: ignore[list-item,misc]
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = list(stream)[-1].usage
    assert usage is not None
    counts = f"prompt={usage.prompt_tokens} cached=0 completion=12 "
    eventually(lambda: any(counts in front.log_of(name) for name in ("worker-0", "worker-1")), what=counts)


def test_stop_strings_tools_and_variables(front: Serve) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    status, answer = ask(
        front, "END of it", max_tokens=60, stop=["D of"], tools=tools, chat_template_kwargs={"mood": "glad"}
    )
    assert status == 200, answer
    choice = json.loads(answer)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("weather;gladu:EN", "stop")
    front.assert_quiet()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("content", "options", "status", "words"),
    [
        ([text("a"), picture(2, 2), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
         {}, 400, "multi_modal_data.image_url[1]"),
        ("a", {"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ("a", {"min_tokens": 30}, 400, "min_tokens"),
        ("a", {"prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ("[[fail:0]]", {}, 500, "fail"),
    ],
    ids=["image", "logit_bias", "min_tokens", "prompt_logprobs", "engine"],
)  # fmt: skip
def test_d22_errors_of_language_workers_are_errors_with_their_status(
    front: Serve, content: object, options: dict[str, object], status: int, words: str, stream: bool
) -> None:
    got, answer = ask(front, content, stream=stream, **options)
    assert got == status, answer
    assert words in error_in(answer)["message"]
    front.assert_quiet()


def test_language_workers_are_not_called_without_a_process_worker(front: Serve) -> None:
    _, listed = front.get("/v1/models")
    assert listed.count('"id":"echo"') == 1
    assert front.instances() == 1


def test_one_trace_goes_through_all_workers(front: Serve) -> None:
    headers = {"x-request-id": "one-trace", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    body = {"model": "echo", "prompt": "hello", "max_tokens": 4}
    assert front.post(COMPLETIONS, body, headers)[0] == 200

    def logged(*names: str) -> bool:
        return any("client=one-trace" in front.log_of(name) for name in names)

    eventually(lambda: logged("process-0") and logged("worker-0", "worker-1"), what="both have logged the request")


def test_the_router_of_the_settings_selects_the_language_worker(front: Serve) -> None:
    def cached(prompt: str) -> int:
        status, answer = front.post(COMPLETIONS, {"model": "echo", "prompt": prompt, "max_tokens": 4})
        assert status == 200, answer
        return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])

    # An odd number, so that in turn each prompt would reach the other worker the second time.
    prompts = [f"{number} of seven prompts " * 20 for number in range(7)]
    assert [cached(prompt) for prompt in prompts] == [0] * len(prompts)
    assert sum(cached(prompt) > 0 for prompt in prompts) >= 6  # the event of the last one may still be on its way


def test_the_extensions_of_a_request_reach_the_router_and_the_language_workers(front: Serve) -> None:
    hints = {"priority": 5, "strict_priority": 1, "osl": 20}
    wishes = {"agent_hints": hints, "router": {"ttft_target": 200}, "cache_salt": "a"}
    status, answer = ask(front, "hello", nvext={**wishes, "routing_constraints": {"preferred_taints": {"echo": 1.0}}})
    assert status == 200, answer
    status, answer = ask(front, "hello", nvext={"routing_constraints": {"required_taints": ["gold"]}})
    assert status != 200, "no language worker has the taint"
    status, answer = ask(front, "hello", nvext={"max_thinking_tokens": 5})
    assert (status, "max_thinking_tokens" in error_in(answer)["message"]) == (400, True), answer
    front.assert_quiet()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_is_cancelled_at_the_engine(front: Serve, stream: bool) -> None:
    def cancelled() -> tuple[float, float]:
        language = sum(front.ended("cancelled", worker) for worker in LANGUAGE)
        return language, front.ended("cancelled", PROCESSES, role="process")

    before = cancelled()
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4000, "stream": stream}
    with front.open(CHAT, body):
        eventually(lambda: sum(in_flight(front)) == 2, what="the engine has the request")
    eventually(lambda: cancelled() == (before[0] + 1, before[1] + 1), what="both workers have cancelled it")
    front.assert_quiet()


PROMPT = string.ascii_letters


def stream_of(front: Serve, tokens: int) -> Iterator[Any]:
    return iter(
        front.client(strict=False).completions.create(
            model="echo", prompt=PROMPT, max_tokens=tokens, stream=True, stream_options={"include_usage": True}
        )
    )


def test_a_request_whose_language_worker_is_killed_moves(front: Serve) -> None:
    stream = stream_of(front, 1000)
    chunks = [next(stream)]
    busy = next(worker for worker in LANGUAGE if front.load(worker)["in_flight"])
    front.worker(busy).kill()
    chunks += stream
    answer = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert assert_unbroken(answer, PROMPT, 1000) == 1
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 1000)
    eventually(lambda: front.health(busy) == 200, 30, "the worker is back")
    front.assert_quiet()


@pytest.mark.slow
def test_without_any_language_worker_requests_are_errors_until_there_is_one(front: Serve) -> None:
    stream = stream_of(front, 4000)
    next(stream)
    for worker in LANGUAGE:
        front.worker(worker).send_signal(signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(stream)
    for worker in LANGUAGE:
        eventually(lambda w=worker: front.health(w) == 200, 30, "the workers are back")
    eventually(lambda: ask(front, "hello")[0] == 200, 30, "requests are answered again")
    assert front.metric("baton_healthy", PROCESSES) == 1
    front.assert_quiet()


@pytest.fixture(scope="module")
def split(
    start_shared: Callable[..., System], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serve, System]]:
    """A tiny model on a prefill and a decode worker behind a process worker, and a frontend that calls them itself."""
    pytest.importorskip("torch")
    from tests.doubles.tiny_models import make_tiny_model

    tiny = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)
    found = tmp_path_factory.mktemp("discovery")
    flags = ("--model", str(tiny), "--runtime-directory", str(found), "--process", "1", "--torch-blocks", "256")
    serve = start_shared(Serve, *flags, engine="torch", prefill=1, decode=1, processors=1)
    assert isinstance(serve, Serve)
    yield serve, start_shared(Direct, found, "torch")
    serve.stop()


def test_prefill_and_decode_workers_answer_the_same_behind_a_process_worker(split: tuple[Serve, System]) -> None:
    prompts = ("ab", "What is the capital of Japan?", "x y " * 200)
    special = {"258": 100}  # <|im_end|>, which does not end an answer of this model
    for prompt, bias in [*((prompt, {}) for prompt in prompts), ("ab", special)]:
        body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        body["logit_bias"] = bias
        body["messages"] = [{"role": "system", "content": "short"}, {"role": "user", "content": prompt}]
        answers = []
        for system in split:
            status, answer = system.post(CHAT, body)
            assert status == 200, answer
            choice, usage = json.loads(answer)["choices"][0], json.loads(answer)["usage"]
            entries = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
            answers.append(
                (choice["message"]["content"], choice["finish_reason"], entries, usage["prompt_tokens"],
                 usage["completion_tokens"])
            )  # fmt: skip
        assert answers[0] == answers[1]
    assert split[0].ended("completed", 0, role="prefill") >= 2 * len(prompts)
