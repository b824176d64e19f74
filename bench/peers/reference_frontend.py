"""The reference frontend: the runtime's HTTP entry point as shipped, with no socket option changed."""

import argparse
import asyncio

import uvloop
from dynamo import _core


async def serve(port: int) -> None:
    runtime = _core.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    arguments = _core.EntrypointArgs(
        _core.EngineType.Dynamic,
        http_host="127.0.0.1",
        http_port=port,
        router_config=_core.RouterConfig(_core.RouterMode.RoundRobin),
        migration_limit=3,
    )
    engine = await _core.make_engine(runtime, arguments)
    await _core.run_input(runtime, "http", engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
