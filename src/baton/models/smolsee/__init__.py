"""smolsee: a vision tower, a connector and small adapters for SmolLM2-135M, in the layout of Idefics3 (SmolVLM).

`weights.safetensors` has what was trained (`tools/smolsee`); `training.jsonl` is the log, which ends with the accuracy
on pictures that training did not use. The rest of the model is SmolLM2.
"""
