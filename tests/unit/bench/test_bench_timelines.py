"""The benchmark of timelines: the switch in other processes, and its table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.timelines import SWITCHED, Switch, Turn, to_markdown

ASK = "from baton.timelines.ring import TimelineRing; print(TimelineRing(10).is_on)"


@pytest.mark.process
def test_the_switch_decides_whether_another_process_records(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    switch = Switch(path)
    variables = os.environ | {"RECORDING_SWITCH": str(path), "PYTHONPATH": str(SWITCHED)}
    answers = []
    for on in (True, False, True):
        switch.set(on)
        answers.append(subprocess.check_output([sys.executable, "-c", ASK], env=variables, text=True).strip())
    assert answers == ["True", "False", "True"]


def test_the_table_has_the_cost_and_the_noise() -> None:
    turn = Turn(
        load="unpaced", streams=4, on_us=(10.2, 10.2), off_us=(10.0, 10.4), on_rate=98, off_rate=99, foreign_cores=0
    )
    text = to_markdown([turn, turn], tokens=8)
    assert "| unpaced | 4 | 10.20 | 10.20 | 1.000 (1.000 to 1.000) | 1.040 (1.040 to 1.040) | 1.010 | 2 | 0.0 |" in text
