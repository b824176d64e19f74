"""Block diffusion decoding: the block that is being decoded, which of its positions are decided, and their tokens."""
