"""`python -m tools.smoldiff.ask URL`: asks a running server the problems that training was measured with.

The accuracy is comparable with the last lines of the training log (`src/baton/models/smoldiff/training.jsonl`).
"""

import argparse
import asyncio
import json
from collections import defaultdict

import aiohttp

from tools.smoldiff.problems import Problem, held_out_problems, is_right
from tools.smoldiff.wordings import KINDS

ANSWER_TOKENS = 96


async def measure(
    url: str, model: str, problems: list[Problem], at_once: int, diffusion: dict[str, object] | None = None
) -> dict[str, float]:
    """Return the share of right answers by kind. Raises ClientResponseError if the server refuses a problem."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    waiting = iter(problems)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(300)) as session:

        async def ask_all() -> None:
            for problem in waiting:
                body = to_body(model, problem, diffusion)
                async with session.post("/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                    [choice] = (await response.json())["choices"]
                ended = choice["finish_reason"] == "stop"
                right[problem.kind].append(ended and is_right(problem, choice["message"]["content"]))

        await asyncio.gather(*(ask_all() for _ in range(at_once)))
    shares = {kind: round(sum(right[kind]) / len(right[kind]), 4) for kind in KINDS if right[kind]}
    return {**shares, "all": round(sum(map(sum, right.values())) / len(problems), 4)}


def to_body(model: str, problem: Problem, diffusion: dict[str, object] | None = None) -> dict[str, object]:
    """Return the request for a problem."""
    messages = [{"role": "user", "content": problem.text}]
    options: dict[str, object] = {} if diffusion is None else {"diffusion": diffusion}
    return {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, **options}


def main() -> None:
    """Read the options, ask, and print the accuracy."""
    parser = argparse.ArgumentParser(prog="python -m tools.smoldiff.ask", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="smoldiff")
    parser.add_argument("--problems", type=int, default=1000, help="of each kind")
    parser.add_argument("--other-words", action="store_true", help="in words that training did not use")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--diffusion", type=json.loads, help="the options of the requests, as JSON")
    options = parser.parse_args()
    problems = held_out_problems(options.problems, options.other_words)
    print(json.dumps(asyncio.run(measure(options.url, options.model, problems, options.at_once, options.diffusion))))


if __name__ == "__main__":
    main()
