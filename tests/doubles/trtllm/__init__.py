"""A double of TensorRT-LLM, as its facts tell it: it computes nothing and behaves like it, in both supported versions.

It is for tests of `engines/trtllm` only. `World` is what several doubles share: the machine, and KV on its way.
"""

from tests.doubles.trtllm.library import make_library
from tests.doubles.trtllm.world import World

__all__ = ["World", "make_library"]
