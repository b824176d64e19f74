"""A double of TensorRT-LLM, as its facts tell it: it computes nothing and behaves like it, in both supported versions.

It is for tests of `engines/trtllm` only. `World` is what several doubles share: the machine, and KV on its way.
"""

from baton.testing.trtllm_double.library import make_library
from baton.testing.trtllm_double.world import World

__all__ = ["World", "make_library"]
