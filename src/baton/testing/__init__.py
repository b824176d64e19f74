"""Contract suites and fakes for authors of engines and runtimes. Needs pytest.

`docs/writing-an-engine.md` shows how an engine author uses them.
"""

import pytest

# Before the suites are imported, so that a failed assertion shows its values.
pytest.register_assert_rewrite(
    "baton.testing.abort_rules",
    "baton.testing.engine_contract",
    "baton.testing.engine_session",
    "baton.testing.engine_suite",
    "baton.testing.generation_rules",
    "baton.testing.handoff_contract",
    "baton.testing.handoff_session",
    "baton.testing.runtime_contract",
    "baton.testing.runtime_stage",
    "baton.testing.shared_engine",
)

from baton.testing.bounded import eventually, measure_lag, run_bounded  # noqa: E402
from baton.testing.engine_contract import EngineContract  # noqa: E402
from baton.testing.fakes import RecordingObserver, Script, ScriptedEngine, running  # noqa: E402
from baton.testing.handoff_contract import HandoffContract  # noqa: E402
from baton.testing.runtime_contract import RuntimeContract  # noqa: E402

__all__ = [
    "EngineContract",
    "HandoffContract",
    "RecordingObserver",
    "RuntimeContract",
    "Script",
    "ScriptedEngine",
    "eventually",
    "measure_lag",
    "run_bounded",
    "running",
]
