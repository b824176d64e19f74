#!/bin/sh
# Creates a virtual environment with lm-eval, for tests/e2e/test_lm_eval.py:
#   scripts/lm-eval-venv.sh [DIRECTORY]      (default: .venv-lm-eval)
# torch and transformers are those of the environment of $PYTHON (default: the python on the PATH).
set -eu

directory=${1:-.venv-lm-eval}
python=${PYTHON:-python}

"$python" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check 'lm-eval[api]==0.4.13'
"$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps 'accelerate==1.15.0' 'peft==0.21.2'
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-and-transformers.pth"
"$directory/bin/python" -c 'import lm_eval, torch, transformers; print("lm-eval", lm_eval.__version__)'
