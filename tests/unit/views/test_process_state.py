"""What the topology shows of a process."""

from baton.views.deployment import ProcessAddress
from baton.views.process_state import ProcessState
from tests.unit.views.hops import hop


def test_a_prefill_worker_that_holds_kv_does_not_decode() -> None:
    state = ProcessState(ProcessAddress(name="8000/prefill-0", url="http://127.0.0.1:1"))
    held = hop("8000/prefill-0", "prefill", {"received": 0, "prefill_chunk": 5, "first_token": 9}, state=None)
    computed = hop("8000/prefill-0", "prefill", {"received": 0, "prefill_chunk": 5}, state=None)
    assert state.to_json([held, computed])["phases"] == {"moving": 1, "prefill": 1}
