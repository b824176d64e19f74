#!/usr/bin/env bash
# Makes an environment, if there is none, and installs Baton in it from this checkout, at the versions of constraints.txt.
#
#   install.sh ENVIRONMENT EXTRAS
#
# With uv, which takes a third of pip's time. uv reads no settings of pip: the wheels that a machine keeps for pip
# (`find-links`, for example a CPU build of torch) are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extras=$2
python=$venv/bin/python

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
[ -x "$venv/bin/uv" ] || "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv

wheels=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}
if [ -n "$wheels" ]; then
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${wheels// /,}}
fi
"$venv/bin/uv" pip install --quiet --python "$python" --constraint constraints.txt --compile-bytecode --editable ".[$extras]"
