#!/usr/bin/env bash
# Makes the environments of the client tests: real clients of the OpenAI and Anthropic APIs, at pinned versions.
#
#   install.sh [ENVIRONMENT=.venv-clients]
#
# Clients that accept the current `openai` package are in ENVIRONMENT/openai-3, the others in ENVIRONMENT/openai-2. The load
# tools are in ENVIRONMENT/aiperf and ENVIRONMENT/guidellm, which needs torch: without a CPU build of it among the wheels
# of pip's `find-links`, that is 5 GB. Node comes from PyPI as well: the npm clients need a later one than Debian has. The
# versions are in *.txt, which were resolved from *.in, and in tests/clients/node/package-lock.json.
# Run again, it does nothing unless one of its inputs has changed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$(realpath -m "${1:-$root/.venv-clients}")
node=$root/tests/clients/node

stamp=$venv/.installed
inputs=$(cat "$here"/* "$node"/package*.json "$node/schemas.mjs" | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ] && [ -d "$node/node_modules" ]; then
    exit 0
fi

wheels=${PIP_FIND_LINKS:-$("${PYTHON:-python3}" -m pip config get global.find-links 2>/dev/null || true)}
if [ -n "$wheels" ]; then
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${wheels// /,}}
fi
for name in openai-3 openai-2 aiperf guidellm; do
    [ -x "$venv/$name/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv/$name"
    [ -x "$venv/openai-3/bin/uv" ] || "$venv/openai-3/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" uv
    "$venv/openai-3/bin/uv" pip install --quiet --python "$venv/$name/bin/python" --compile-bytecode \
        --requirement "$here/$name.txt"
done

export PATH=$venv/openai-3/bin:$PATH
npm ci --prefix "$node" --no-audit --no-fund --ignore-scripts --loglevel error
node "$node/schemas.mjs" > "$venv/schemas.json"

printf %s "$inputs" > "$stamp"
