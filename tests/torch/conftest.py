"""One thread for torch: the models are tiny, and on a busy machine threads wait for each other instead of computing."""

import torch

torch.set_num_threads(1)
