"""A minimal worker on this runtime: it pushes each chunk of the double as it arrives, without inspecting it.

No cancellation, limits, usage or errors: what remains is the cost of the double and of the runtime's messages.
"""

import argparse
from collections.abc import Mapping
from typing import Any, Protocol

import uvloop

from bench.peers.fake_sglang import Engine
from bench.peers.reference_worker import Chunks, serve


class Sender(Protocol):
    """The runtime's response sender."""

    def send(self, message: dict[str, object]) -> None: ...

    def close(self) -> None: ...


async def run(model_dir: str, pace_s: float) -> None:
    engine = Engine(pace_s)

    async def generate(request: Mapping[str, Any], context: object, response_sender: Sender | None = None) -> Chunks:
        assert response_sender is not None
        tokens = {"max_new_tokens": request["stop_conditions"]["max_tokens"]}
        rid = str(id(request))
        async for chunk in await engine.async_generate(rid=rid, input_ids=request["token_ids"], sampling_params=tokens):
            out: dict[str, object] = {"token_ids": chunk["output_ids"], "index": 0}
            if chunk["meta_info"]["finish_reason"]:
                out["finish_reason"] = "length"
            response_sender.send(out)
        response_sender.close()
        nothing: tuple[dict[str, object], ...] = ()
        for chunk in nothing:
            yield chunk

    await serve(model_dir, generate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    options = parser.parse_args()
    uvloop.run(run(options.model_dir, options.pace_ms / 1000))


if __name__ == "__main__":
    main()
