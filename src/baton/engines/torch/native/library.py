"""The native step as a library: its sources, its compiler flags and its functions. Knows nothing of models."""

import ctypes
import logging
import sys
from ctypes import POINTER, c_float, c_int, c_int32, c_void_p
from pathlib import Path

from baton.engine_kit.cpp_build import BuildError, cpu_features, load_library

log = logging.getLogger(__name__)

_NAMES = ("step.cpp", "attention.hpp", "experts.hpp", "kernels.hpp", "layers.hpp", "pool.hpp", "sparse.hpp")
SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
# Without -ffast-math: NaN and infinity must reach the logits. With -ffp-contract=off: a compiler that is free to fuse
# products into sums does so in some loops only, and a row would depend on the batch it is in.
FLAGS = ("-O3", "-w", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread")


class Shape(ctypes.Structure):
    """The shape of a model, with the fields of `Shape` in layers.hpp."""

    _fields_ = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("context", c_int32),
        ("blocks", c_int32),
        ("block_size", c_int32),
        ("is_bf16", c_int32),
        ("time_pairs", c_int32),
        ("height_pairs", c_int32),
        ("experts", c_int32),
        ("experts_per_token", c_int32),
        ("expert_ffn", c_int32),
        ("shared_ffn", c_int32),
        ("normalised", c_int32),
        ("slots", c_int32),
        ("ranks", c_int32),
        ("eps", c_float),
    ]


def load_decoder_library() -> ctypes.CDLL | None:
    """Return the native step, compiled if needed; None if that fails, with the reason in the log."""
    try:
        return _declare(load_library(SOURCES, FLAGS))
    except BuildError as error:
        log.warning(
            "the native step is not available (%s): torch computes instead, which takes three to five times as long",
            error,
        )
        return None


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AMX): torch uses that, the native step does not."""
    return sys.platform == "linux" and " amx_bf16" in cpu_features()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.baton_decoder_new.argtypes = [POINTER(Shape), c_int]
    library.baton_decoder_new.restype = c_void_p
    library.baton_decoder_bind.argtypes = [c_void_p] * 5
    library.baton_decoder_bind.restype = None
    library.baton_decoder_dispatch.argtypes = [c_void_p, c_void_p, c_void_p, c_int, c_int]
    library.baton_decoder_dispatch.restype = None
    library.baton_decoder_record.argtypes = [c_void_p, c_void_p, c_void_p]
    library.baton_decoder_record.restype = None
    library.baton_decoder_forward.argtypes = [c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p]
    library.baton_decoder_forward.restype = c_int
    library.baton_decoder_score.argtypes = [c_void_p, c_int, c_void_p, c_void_p]
    library.baton_decoder_score.restype = c_int
    library.baton_decoder_free.argtypes = [c_void_p]
    library.baton_decoder_free.restype = None
    return library
