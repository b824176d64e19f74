"""`python -m tools.smolsee.ask URL`: asks a running server the questions that training was measured with.

The pictures travel as a client sends them: PNG files of their own size, as data URLs. The accuracy is comparable with
the last lines of the training log (`src/baton/models/smolsee/training.jsonl`).
"""

import argparse
import asyncio
import base64
import io
import json
import random
from collections import defaultdict

import aiohttp

from tools.smolsee.model import PICTURE
from tools.smolsee.pictures import Scene
from tools.smolsee.questions import is_right
from tools.smolsee.train import ANSWER_TOKENS, FIRST_TEST_PICTURE, TEST_SEED, Form, Sample, make_sample, picture


def samples(count: int, pictures: int, held_out: bool) -> list[Sample]:
    """Return the first `count` questions about the test pictures."""
    scenes: list[Scene] = [picture(FIRST_TEST_PICTURE + number)[0] for number in range(pictures)]
    chance = random.Random(TEST_SEED)
    return [make_sample(scenes, chance, Form(), held_out) for _ in range(count)]


def to_messages(sample: Sample) -> list[dict[str, object]]:
    """Return the chat messages of a question."""
    numbers = iter(sample.pictures)
    content: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": data_url(next(numbers))}}
        if part == PICTURE
        else {"type": "text", "text": part}
        for part in sample.parts
    ]
    return [{"role": "user", "content": content}]


def data_url(number: int) -> str:
    """Return a test picture as a data URL."""
    file = io.BytesIO()
    picture(FIRST_TEST_PICTURE + number)[1].save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def measure(url: str, model: str, asked: list[Sample], at_once: int) -> dict[str, float]:
    """Return the share of right answers by task. Raises ClientResponseError if the server refuses a question."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    waiting = iter(asked)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(300)) as session:

        async def ask_all() -> None:
            for sample in waiting:
                text = await _answer(session, model, sample)
                right[sample.question.task].append(is_right(sample.question, text))

        await asyncio.gather(*(ask_all() for _ in range(at_once)))
    shares = {task: round(sum(values) / len(values), 4) for task, values in sorted(right.items())}
    return {**shares, "all": round(sum(map(sum, right.values())) / len(asked), 4)}


async def _answer(session: aiohttp.ClientSession, model: str, sample: Sample) -> str:
    body = {"model": model, "messages": to_messages(sample), "temperature": 0, "max_tokens": ANSWER_TOKENS}
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        return str((await response.json())["choices"][0]["message"]["content"])


def main() -> None:
    """Read the options, ask, and print the accuracy."""
    parser = argparse.ArgumentParser(prog="python -m tools.smolsee.ask", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="smolsee")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--pictures", type=int, default=8000, help="as many as training was measured with")
    parser.add_argument("--held-out", action="store_true", help="in words that training did not use")
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    asked = samples(options.questions, options.pictures, options.held_out)
    print(json.dumps(asyncio.run(measure(options.url, options.model, asked, options.at_once))))


if __name__ == "__main__":
    main()
