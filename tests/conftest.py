"""What must be true before anything is imported: the runtime sets up logs and traces while it is imported."""

import os
from pathlib import Path

from hypothesis import settings

from baton.config.runtime import RuntimeOptions
from baton.runtimes.dynamo.environment import environment

_RUNTIME = environment(RuntimeOptions())

os.environ.update({name: _RUNTIME[name] for name in ("DYN_LOG", "DYN_LOGGING_JSONL")})

# Without a GPU, Triton's kernels run in its interpreter, which is chosen while Triton is imported, as by torch.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes says nothing on a busy machine.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")
