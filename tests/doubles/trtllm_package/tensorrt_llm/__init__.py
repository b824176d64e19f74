"""The double as an installed package, for worker processes: on the import path, it is TensorRT-LLM.

Every name that the adapter imports is where the library has it. TRTLLM_DOUBLE_WORLD is the directory of the world.
"""

import os
import sys
import types
from pathlib import Path

from baton.engines.trtllm.compat import PATHS, PATHS_13
from tests.doubles.trtllm import FileWorld, make_library

__version__ = "1.3.0rc22"

_LATE = ("autodeploy_llm", "autodeploy_arguments", "encoder", "shared_tensors", "load_video")


def _module(name: str) -> types.ModuleType:
    """Return the module of this name, with the packages that it is in."""
    if name not in sys.modules:
        parent, _, own = name.rpartition(".")
        module = types.ModuleType(name)
        module.__path__ = []
        setattr(_module(parent), own, module)
        sys.modules[name] = module
    return sys.modules[name]


_library = make_library(__version__, FileWorld(Path(os.environ["TRTLLM_DOUBLE_WORLD"])))
for _name, _path in (PATHS | PATHS_13).items():
    _member = getattr(_library, _name)
    _place, _, _own = _path.rpartition(".")
    setattr(_module(f"tensorrt_llm.{_place}"), _own, _member() if _name in _LATE else _member)
