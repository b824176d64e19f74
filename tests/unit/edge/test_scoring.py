"""Requests that ask for their own prompt: what is sent to the frontend, and how the answers are joined."""

import asyncio
import json
from typing import Any

import pytest

from baton.edge.errors import FieldError
from baton.edge.extra_options import carry_extra_options
from baton.edge.messages import Answer
from baton.edge.prompt_requests import CHAT, COMPLETIONS, MAX_PROMPTS, prompt_query
from baton.edge.scoring import AT_ONCE, answer_query
from baton.errors import EngineFailed, Overloaded
from baton.protocol.codec import decode_request
from baton.testing import run_bounded

Json = dict[str, Any]


class Frontend:
    """A frontend with a worker whose tokens are letters and whose answer is always "xy"."""

    def __init__(self, begin: str = "") -> None:
        self.bodies: list[Json] = []
        self.begin = begin
        self.at_once = self.most_at_once = 0

    async def send(self, body: Json) -> Json:
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        prompt = body.get("prompt", "chat")
        tokens = [ord(letter) for letter in self.begin + prompt] if isinstance(prompt, str) else list(prompt)
        request = decode_request(
            {
                "token_ids": tokens,
                "stop_conditions": {"max_tokens": body.get("max_tokens")},
                "annotations": body["nvext"]["annotations"],
            }
        )
        chosen = [] if request.stop.max_tokens == 0 else ["x", "y"]
        choices = []
        for index in range(body.get("n", 1)):
            choice: Json = {"index": index, "finish_reason": "length", "text": "".join(chosen), "logprobs": None}
            if body.get("logprobs") is not None and chosen:
                choice["logprobs"] = {
                    "tokens": chosen,
                    "token_logprobs": [-0.5, -0.25],
                    "top_logprobs": [{"x": -0.5}, {"y": -0.25}],
                    "text_offset": [],
                }
            choices.append(choice)
        extensions: Json = {"engine_data": self._prompt(tokens, request.output), "worker_id": 7}
        if "completion_token_ids" in body["nvext"]["extra_fields"]:
            extensions["completion_token_ids"] = [ord(letter) for letter in chosen]
        counts = {"prompt_tokens": len(tokens), "completion_tokens": len(chosen)}
        usage = {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": {"cached_tokens": 1}}
        return {"id": "cmpl-1", "model": "m", "choices": choices, "usage": usage, "nvext": extensions}

    def _prompt(self, tokens: list[int], output: Any) -> Json:
        data: Json = {}
        if output.echo:
            texts = [chr(token) for token in tokens]
            data = {"prompt_text": "".join(texts), "prompt_tokens": texts, "prompt_offsets": list(range(len(texts)))}
        if output.echo or output.return_token_ids:
            data["prompt_token_ids"] = tokens
        if output.prompt_logprobs is not None:
            data["prompt_logprobs"] = [None, *(self._score(token, output.prompt_logprobs) for token in tokens[1:])]
        return data

    def _score(self, token: int, count: int) -> Json:
        """The token itself is the third best; `q` and `r` are better."""
        best = {str(ord(letter)): rank for rank, letter in enumerate("qr", 1) if rank <= count}
        own = {str(token): {"logprob": -3.0, "rank": 3 if count >= 3 else None, "decoded_token": chr(token)}}
        return own | {
            key: {"logprob": -rank, "rank": rank, "decoded_token": chr(int(key))} for key, rank in best.items()
        }


def ask(frontend: Frontend, path: str = COMPLETIONS, **body: Any) -> Answer:
    sent = {"model": "m", **({"prompt": "abc", "max_tokens": 2} if path == COMPLETIONS else {"messages": []}), **body}
    query = prompt_query(path, sent)
    assert query is not None

    async def run() -> Answer:
        return await answer_query(query, sent, frontend.send)

    return run_bounded(run())


def asked(frontend: Frontend, path: str = COMPLETIONS, **body: Any) -> Json:
    found: Json = json.loads(ask(frontend, path, **body).body)
    return found


def test_plain_requests_are_not_touched() -> None:
    plain: list[Json] = [{}, {"echo": False}, {"echo": None, "logprobs": 2}]
    for options in plain:
        assert prompt_query(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **options}) is None
        assert prompt_query(CHAT, {"messages": [], **options}) is None


def test_fields_that_ask_for_nothing_do_not_reach_the_frontend() -> None:
    nothing: list[Json] = [{"return_token_ids": False}, {"prompt_logprobs": None}, {"truncate_prompt_tokens": None}]
    for options in nothing:
        assert carry_extra_options({"prompt": "a", **options}) == {"prompt": "a"}
    for asked in ({"prompt_logprobs": 0}, {"return_token_ids": True}, {"truncate_prompt_tokens": 1}):
        assert carry_extra_options({"prompt": "a", **asked}) == {"prompt": "a", **asked}


def test_echo_puts_the_prompt_before_the_text() -> None:
    (choice,) = asked(Frontend(), echo=True)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("abcxy", None, "length")


def test_echo_with_logprobs_scores_prompt_and_text() -> None:
    (choice,) = asked(Frontend(), echo=True, logprobs=1)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "x", "y"],
        "token_logprobs": [None, -3.0, -3.0, -0.5, -0.25],
        "top_logprobs": [None, {"b": -3.0, "q": -1}, {"c": -3.0, "q": -1}, {"x": -0.5}, {"y": -0.25}],
        "text_offset": [0, 1, 2, 3, 4],
    }


def test_logprobs_0_has_the_tokens_themselves_only() -> None:
    (choice,) = asked(Frontend(), echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -3.0}]


def test_max_tokens_0_scores_and_generates_nothing() -> None:
    frontend = Frontend()
    answer = asked(frontend, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("abc", ["a", "b", "c"])
    assert answer["usage"]["completion_tokens"] == 0
    assert frontend.bodies[0]["max_tokens"] == 1, "the frontend takes no 0"


def test_a_token_that_the_tokenizer_adds_is_no_part_of_the_text() -> None:
    (choice,) = asked(Frontend(begin="^"), echo=True, logprobs=0)["choices"]
    assert choice["text"] == "abcxy"
    assert choice["logprobs"]["tokens"] == ["^", "a", "b", "c", "x", "y"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4]


def test_each_prompt_of_a_list_gets_its_own_scores() -> None:
    frontend = Frontend()
    answer = asked(frontend, prompt=[[97, 98], [99]], echo=True, logprobs=0, n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "abxy"),
        (1, "abxy"),
        (2, "cxy"),
        (3, "cxy"),
    ]
    assert [choice["logprobs"]["tokens"][0] for choice in answer["choices"]] == ["a", "a", "c", "c"]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert [body["prompt"] for body in frontend.bodies] == [[97, 98], [99]]


def test_many_prompts_are_sent_a_few_at_a_time() -> None:
    frontend = Frontend()
    assert len(asked(frontend, prompt=["a"] * 100, echo=True)["choices"]) == 100
    assert frontend.most_at_once == AT_ONCE
    with pytest.raises(FieldError, match="prompts"):
        ask(frontend, prompt=["a"] * (MAX_PROMPTS + 1), echo=True)


def test_prompt_logprobs_are_in_the_choice_and_in_a_chat_beside_them() -> None:
    answer = asked(Frontend(), prompt_logprobs=1)
    scores = [None] + [
        {str(token): {"logprob": -3.0, "rank": None, "decoded_token": chr(token)}, "113": Q} for token in (98, 99)
    ]
    assert answer["choices"][0]["prompt_logprobs"] == scores
    assert answer["choices"][0]["text"] == "xy"
    chat = asked(Frontend(), CHAT, prompt_logprobs=0)
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == 4


Q = {"logprob": -1, "rank": 1, "decoded_token": "q"}


def test_token_ids_are_returned() -> None:
    answer = asked(Frontend(), return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98, 99], [120, 121])
    assert answer["nvext"] == {"worker_id": 7}, "only what the client asked for"
    chat = asked(Frontend(), CHAT, return_token_ids=True)
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([99, 104, 97, 116], [120, 121])


def test_a_truncated_prompt_keeps_its_last_tokens() -> None:
    frontend = Frontend()
    (choice,) = asked(frontend, truncate_prompt_tokens=2, echo=True)["choices"]
    assert choice["text"] == "bcxy"
    assert [body["prompt"] for body in frontend.bodies] == ["abc", [98, 99]]


def test_a_stream_has_one_event_for_each_choice() -> None:
    answer = ask(Frontend(), echo=True, n=2, stream=True, stream_options={"include_usage": True})
    assert answer.content_type == b"text/event-stream"
    *events, done, rest = answer.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [[choice["text"] for choice in chunk["choices"]] for chunk in chunks] == [["abcxy"], ["abcxy"], []]
    assert [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks] == [None, None, 2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"return_token_ids": True, "stream": True}, "return_token_ids"),
        (CHAT, {"return_token_ids": True, "n": 2}, "return_token_ids"),
        (CHAT, {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(path: str, body: Json, param: str) -> None:
    with pytest.raises(FieldError) as caught:
        ask(Frontend(), path, **body)
    assert caught.value.param == param


def test_the_first_error_cancels_the_other_prompts() -> None:
    cancelled: list[str] = []

    async def send(body: Json) -> Json:
        if body["prompt"] == "bad":
            raise Overloaded("busy")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(body["prompt"])
        raise AssertionError

    async def run() -> None:
        body = {"model": "m", "prompt": ["a", "bad", "b"], "echo": True, "max_tokens": 1}
        query = prompt_query(COMPLETIONS, body)
        assert query is not None
        with pytest.raises(Overloaded, match="busy"):
            await answer_query(query, body, send)

    run_bounded(run())
    assert sorted(cancelled) == ["a", "b"]


def test_a_worker_that_returns_nothing_of_the_prompt_is_an_error() -> None:
    class Silent(Frontend):
        def _prompt(self, tokens: list[int], output: Any) -> Json:
            return {}

    for body in ({"echo": True, "logprobs": 1}, {"echo": True, "prompt": [97]}, {"return_token_ids": True}):
        with pytest.raises(EngineFailed, match="did not return"):
            ask(Silent(), **body)


def test_fields_that_the_frontend_drops_are_carried_in_an_annotation() -> None:
    plain = {"model": "m", "prompt": "a"}
    assert carry_extra_options(plain) is plain
    assert carry_extra_options({**plain, "logit_bias": None}) == plain
    body = {**plain, "logit_bias": {"5": 1}, "stop_regex": "a", "nvext": {"annotations": ["mine"], "router": {}}}
    carried = carry_extra_options(body)
    assert carried.keys() == {"model", "prompt", "nvext"}
    extensions = carried["nvext"]
    assert isinstance(extensions, dict)
    assert extensions.keys() == {"annotations", "router"}
    request = decode_request({"token_ids": [1], "annotations": extensions["annotations"]})
    assert (request.sampling.logit_bias, request.stop.stop_regex) == ({"5": 1.0}, "a")
    assert request.annotations == ("mine",)
