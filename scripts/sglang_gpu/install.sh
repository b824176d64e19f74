#!/usr/bin/env bash
# Makes an environment with SGLang and Baton on a machine with a GPU that reaches a package index: about 12 GB.
#
#   install.sh [ENVIRONMENT=.venv-sglang-gpu] [SGLANG_VERSION=0.5.23]
#
# Without a network: prepare.sh elsewhere, then unpack.sh. Run again, it does nothing.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-sglang-gpu}
version=${2:-0.5.23}
if [ -f "$venv/env.sh" ]; then
    exit 0
fi
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip "sglang==$version" nixl-cu13==1.5.1 nixl==1.5.1 checkpoint-engine==0.1.2 torch-memory-saver==0.0.10
pip --editable "$root" 'hypothesis>=6.120' 'openai>=1.60' 'psutil>=6' 'pytest>=8.3' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'av>=15,<19'
"$here/environment.sh" "$venv"
