"""A pytest plugin for `make unit`: no test imports torch and no test starts a process."""

import multiprocessing.process
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

STARTS_A_PROCESS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}

_in_a_test = False
_start = multiprocessing.process.BaseProcess.start


class _WithoutTorch(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch":
            raise ImportError("make unit runs without torch: move the test to tests/torch")
        return None


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if _in_a_test and event in STARTS_A_PROCESS:
        raise RuntimeError(f"make unit starts no process ({event}): mark the test with pytest.mark.process")


def _refuse_multiprocessing(process: multiprocessing.process.BaseProcess) -> None:
    _refuse_processes("subprocess.Popen", ())
    _start(process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Refuse processes while a test runs; pytest-xdist starts some of its own before."""
    global _in_a_test
    _in_a_test = True
    try:
        return (yield)
    finally:
        _in_a_test = False


sys.meta_path.insert(0, _WithoutTorch())
sys.addaudithook(_refuse_processes)
multiprocessing.process.BaseProcess.start = _refuse_multiprocessing  # type: ignore[method-assign] # it has no audit event
