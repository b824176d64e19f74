"""A double of TensorRT-LLM with the behaviour of both supported versions, without a GPU and without a model.

It is for tests of `engines/trtllm` only. `World` is what several doubles share: the machine, and KV in transfer.
"""

from tests.doubles.trtllm.file_world import FileWorld
from tests.doubles.trtllm.library import make_library
from tests.doubles.trtllm.world import World

__all__ = ["FileWorld", "World", "make_library"]
