"""A machine on which Triton cannot compile computes with torch; other errors are raised."""

import subprocess

import pytest
import torch

pytest.importorskip("triton")

from triton.errors import TritonError

from baton.engines.torch.gpu.compilation import find_problem, run_small_kernel


def raising(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, ["gcc"]),
        PermissionError("~/.triton"),
        TritonError("no such GPU"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_a_problem_with_its_cure(error: Exception) -> None:
    problem = find_problem(lambda: raising(error), lambda: None)
    assert problem is not None
    assert str(error) in problem
    assert "apt install gcc" in problem


def test_a_kernel_too_large_for_the_gpu_is_a_problem() -> None:
    assert find_problem(lambda: None, lambda: raising(TritonError("out of shared memory"))) == "out of shared memory"


def test_other_errors_of_a_step_are_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        find_problem(lambda: None, lambda: raising(RuntimeError("shapes do not fit")))


def test_there_is_no_problem_where_kernels_run() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert find_problem(lambda: run_small_kernel(device), lambda: None) is None
