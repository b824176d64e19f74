"""The runtime contract over the runtime inside one process."""

from collections.abc import AsyncGenerator

from baton.ports.runtime import Context, Runtime, Service, Wire
from baton.testing import RuntimeContract, run_bounded
from baton.testing.memory_runtime import MemoryContext, MemoryRuntime


class TestMemoryRuntime(RuntimeContract):
    refuses_to_block = False
    traces = False

    def make_runtime(self) -> Runtime:
        return MemoryRuntime()


def test_trace_headers_of_the_parent_reach_the_handler() -> None:
    async def publish(request: object, context: Context) -> AsyncGenerator[Wire, None]:
        yield dict(context.trace_headers)

    async def body() -> None:
        runtime = MemoryRuntime()
        await runtime.serve("a.b.c", Service(publish, lambda raw: raw, lambda reply: reply))
        client = await runtime.client("a.b.c")
        parent = MemoryContext(trace_headers={"traceparent": "00-1-2-01", "x-request-id": "mine"})
        assert [reply async for reply in client.call({}, parent=parent)] == [dict(parent.trace_headers)]

    run_bounded(body())
