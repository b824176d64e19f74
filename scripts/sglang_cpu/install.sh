#!/usr/bin/env bash
# Makes an environment in which the real SGLang runs on a CPU without AMX, with Baton in it: from PyPI alone, 3 GB.
#
#   install.sh [ENVIRONMENT=.venv-sglang] [SGLANG_VERSION=0.5.23]
#
# SGLang's own requirements pull CUDA in. So SGLang comes without them, and then those that its CPU path imports, at
# the versions that SGLang asks for. `sgl_kernel` here stands in for SGLang's kernels: without AMX none is called.
# Run again, it does nothing unless one of its inputs has changed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-sglang}
version=${2:-0.5.23}
python=${PYTHON:-python3}
torch=2.13.0
triton=3.7.1

stamp=$venv/.installed
inputs=$(cat "$here"/*.sh "$here"/*.py "$here"/sgl_kernel/*.py "$root/pyproject.toml"; echo "$version")
inputs=$(printf %s "$inputs" | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then
    exit 0
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
printf 'torch==%s\ntriton==%s\n' "$torch" "$triton" > "$venv/constraints.txt"

# The index for CPU builds, where it can be reached, saves 2 GB; PyPI's own build works as well.
pip "torch==$torch"
pip --no-deps "sglang==$version" "triton==$triton" torchvision==0.28.0

"$venv/bin/python" - "$root/pyproject.toml" > "$venv/requirements.txt" <<'PY'
"""Print what SGLang's CPU path imports, at SGLang's own versions, and what Baton and its tests need."""

import importlib.metadata
import re
import sys
import tomllib

IMPORTED = """aiohttp apache-tvm-ffi av compressed-tensors distro einops fastapi gguf interegular ipython llguidance
msgspec numpy openai openai-harmony orjson packaging partial-json-parser pillow prometheus-client psutil pybase64
pydantic python-multipart pyzmq regex requests scipy sentencepiece setproctitle soundfile tiktoken tokenizers tqdm
transformers uvicorn uvloop xgrammar xxhash zstandard""".split()
NOT_DECLARED = ("accelerate", "dill", "loguru")
FOR_TESTS = ("hypothesis", "openai", "psutil", "pytest", "pytest-timeout", "pytest-xdist")


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found.group()).lower()


declared: dict[str, str] = {}
for line in importlib.metadata.requires("sglang") or ():
    if "extra ==" not in line:
        requirement = line.split(";")[0].strip()
        declared.setdefault(name_of(requirement), requirement)

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
asked = [declared.get(name, name) for name in IMPORTED]
taken = {name_of(requirement) for requirement in asked}
development = project["optional-dependencies"]["dev"]
for requirement in (*project["dependencies"], *(line for line in development if name_of(line) in FOR_TESTS)):
    if name_of(requirement) not in taken:
        asked.append(requirement)
print("\n".join((*asked, *NOT_DECLARED)))
PY
pip --constraint "$venv/constraints.txt" --requirement "$venv/requirements.txt"
pip --no-deps --editable "$root"

# Two ways for KV to go from engine to engine. Without dependencies, for those are CUDA's.
pip --no-deps nixl==1.5.1 nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1

packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
rm -rf "$packages/sgl_kernel"
cp -r "$here/sgl_kernel" "$packages/"
cp "$here/sgl_cpu_shim.py" "$packages/"
echo 'import sgl_cpu_shim' > "$packages/sgl_cpu_shim.pth"

# Mooncake wants libibverbs, which nixl-cu12 carries under another name. Used with LD_LIBRARY_PATH=ENVIRONMENT/ibv.
mkdir -p "$venv/ibv"
for library in "$packages"/nixl_cu12.libs/{libibverbs,libnl-3,libnl-route-3}-*; do
    ln -sf "$library" "$venv/ibv/"
done
ln -sf "$packages"/nixl_cu12.libs/libibverbs-* "$venv/ibv/libibverbs.so.1"

printf %s "$inputs" > "$stamp"
