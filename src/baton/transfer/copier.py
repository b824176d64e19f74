"""The compiled copy of blocks.

A copy by numpy takes the interpreter's lock again for every run of blocks, and waits for it whenever another thread is
busy: a fragmented request then takes a hundred times as long. The compiled one gives the lock up once.
"""

import ctypes
import functools
import logging
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from baton.engine_kit.cpp_build import BuildError, load_library

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("copy.cpp"),)
FLAGS = ("-O2",)


@functools.cache
def load_copier() -> ctypes.CDLL | None:
    """Return the compiled copy, building it if need be; None, with a log line that says why, if it cannot be."""
    try:
        library = load_library(SOURCES, FLAGS)
    except BuildError as error:
        log.warning("KV is copied by numpy, slowly when blocks are scattered: %s", error)
        return None
    counts = [c_int64] * 4
    library.baton_copy_blocks.argtypes = [c_void_p, counts[0], c_void_p, *counts[1:], *[c_void_p] * 2, c_int64]
    library.baton_copy_blocks.argtypes += [POINTER(c_int32)]
    library.baton_copy_blocks.restype = c_int
    return library
