"""Serves the view of a fake deployment: `python -m tests.view.serve_fake --prefill 4 --decode 8 --pools fast,long`."""

import argparse
import asyncio

from baton.views.server import ViewServer
from tests.view.fake_deployment import disaggregated


async def serve(options: argparse.Namespace) -> None:
    fake = disaggregated(options.prefill, options.decode, options.encode, [p for p in options.pools.split(",") if p])
    await fake.start()
    fake.history(options.history_s, options.rate)
    view = ViewServer(fake, port=options.port)
    await view.start()
    print(view.url, flush=True)
    try:
        async with asyncio.timeout(options.seconds):
            await fake.traffic(options.rate)
    except TimeoutError:
        pass
    finally:
        await view.aclose()
        await fake.stop()


parser = argparse.ArgumentParser()
for name, default in (("prefill", 2), ("decode", 3), ("encode", 1), ("port", 0)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--pools", default="")
parser.add_argument("--rate", type=float, default=4.0)
parser.add_argument("--history-s", type=float, default=600.0)
parser.add_argument("--seconds", type=float, default=600.0)
asyncio.run(serve(parser.parse_args()))
