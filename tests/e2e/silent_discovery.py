"""`python -m tests.e2e.silent_discovery ETCD`: start a runtime, wait for a line, and ask discovery for three things.

Each is to fail in time: a line with its name and the error is printed.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from baton.config.runtime import RuntimeOptions
from baton.errors import BatonError
from baton.ports.runtime import Context, Service, Wire
from baton.runtimes.dynamo import deadline
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.testing.runtime_contract import CARD


async def main(etcd: str) -> None:
    runtime = DynamoRuntime(RuntimeOptions(discovery="etcd", etcd=etcd))
    await runtime.start()
    endpoint = await runtime.serve("silent.worker.generate", Service(_echo, _as_it_is, _as_it_is))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    deadline.TIMEOUT_S = 1.0
    await _report("client", runtime.client("silent.other.generate"))
    await _report("serve", runtime.serve("silent.worker.other", Service(_echo, _as_it_is, _as_it_is)))
    await _report("register", endpoint.register_model(CARD))


async def _report(name: str, asked: Awaitable[object]) -> None:
    try:
        await asked
    except BatonError as error:
        print(name, error.code, error.message, flush=True)


def _as_it_is(value: Any) -> Any:
    return value


async def _echo(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
    yield request


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
