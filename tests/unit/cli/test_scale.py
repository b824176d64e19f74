"""`baton scale` refuses counts that contradict each other before it looks for a `baton serve`."""

import pytest
from click.testing import CliRunner

from baton.cli.scale import scale


@pytest.mark.parametrize("arguments", [["decode=1", "prefill=2", "decode=3"], ["workers=1", "worker=3"]])
def test_a_role_that_is_given_twice_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(scale, arguments)
    assert result.exit_code == 2
    assert "is given twice" in " ".join(result.stderr.split())
