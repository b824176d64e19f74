"""On a machine without a compiler, the one that pip installs builds the native step, and the step is exact."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADS = "from baton.engines.torch.native.library import load_decoder_library; assert load_decoder_library() is not None"


@pytest.mark.slow  # it compiles the C++ library first
@pytest.mark.timeout(600)
def test_the_step_that_a_compiler_from_pip_builds_is_exact(tmp_path: Path) -> None:
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("CXX", "PYTEST_"))}
    variables |= {"PATH": str(nowhere), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", LOADS], env=variables, timeout=400, check=True)
    exact = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/torch/test_exact.py",
        "-k",
        "qwen3 or llama-odd",
    ]
    done = subprocess.run(exact, env=variables, timeout=180, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(list((tmp_path / "cache" / "baton" / "native").glob("*.so"))) == 1
