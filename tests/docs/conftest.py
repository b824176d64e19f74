"""Directories of the readers that follow the pages."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a directory with a short name, as a home has: sockets in it have names of at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="docs-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)
