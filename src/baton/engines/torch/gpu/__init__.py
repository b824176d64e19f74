"""The step on a GPU: kernels in Triton over the paged KV cache, CUDA graphs, and sampling without waiting for it."""
