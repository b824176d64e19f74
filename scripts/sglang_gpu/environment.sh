#!/usr/bin/env bash
# Puts Baton into an environment that has SGLang, and writes ENVIRONMENT/env.sh: what SGLang's processes need.
#
#   environment.sh ENVIRONMENT
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$(cd "$1" && pwd)
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$root/src" > "$packages/baton.pth"
cat > "$venv/bin/baton" <<BATON
#!$venv/bin/python
from baton.cli.main import main

main()
BATON
chmod +x "$venv/bin/baton"

# The memory saver is preloaded, before torch: it needs the CUDA runtime that torch brings.
libraries=$("$venv/bin/python" -c '
import importlib.util, pathlib
places = importlib.util.find_spec("nvidia").submodule_search_locations
found = [path for place in places for path in pathlib.Path(place).glob("cu[0-9]*/lib")]
print(found[0] if found else "")')
compiler=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cuda=$(dirname "$(dirname "$(readlink -f "$compiler")")")
cat > "$venv/env.sh" <<ENV
export PATH=$venv/bin:$cuda/bin:\$PATH CUDA_HOME=$cuda
export LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
export SGLANG_JIT_CACHE_DIR=$venv/cache/jit TRITON_CACHE_DIR=$venv/cache/triton
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
ENV
