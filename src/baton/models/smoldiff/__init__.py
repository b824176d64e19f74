"""smoldiff: a masked-diffusion model in the layout of SDAR, as a whole model directory.

`model.safetensors` was trained by `tools/smoldiff`, which also wrote the other files; `training.jsonl` is the log,
which ends with the accuracy on problems that training never had.
"""
