#!/usr/bin/env bash
# Makes the pieces from which a GPU machine without a network gets SGLang, Baton's dependencies and pytest.
#
#   prepare.sh [PIECES=.sglang-gpu] [SGLANG_VERSION=0.5.23]
#
# About 700 MB of downloads, kept in DOWNLOADS if that is set, and minutes of xz. The pieces are for Linux on x86-64,
# Python 3.12, torch 2.11 with CUDA 13 and a Hopper GPU, whatever runs this script. PIECE_MIB limits the size of one:
# each is in a directory of its own, so that they can be carried one by one. Needs pip, tar, xz and strip.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
pieces=${1:-$root/.sglang-gpu}
version=${2:-0.5.23}
python=${PYTHON:-python3}
# SGLang asks for torch 2.14; its Python runs with 2.11 and its kernels do not. These are of SGLang 0.5.17, which was
# built for torch 2.11, and have the names that 0.5.23 imports.
kernels=0.4.5
nixl=1.5.1
runtime=1.6.1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=${DOWNLOADS:-$work/wheels}
mkdir -p "$wheels" "$work/packed" "$pieces"

target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for minor in $(seq 34 -1 5); do
    target+=(--platform "manylinux_2_${minor}_x86_64")
done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)

wheel() {  # PATTERN REQUIREMENT DIRECTORY: download it, unless it is there, and unpack it
    compgen -G "$wheels/$1" > /dev/null ||
        "$python" -m pip --quiet --disable-pip-version-check download --dest "$wheels" "${target[@]}" "$2"
    "$python" -m zipfile -e "$(compgen -G "$wheels/$1" | head -1)" "$3"
}
pack() {  # NAME: what is in $work/NAME
    find "$work/$1" -name __pycache__ -prune -exec rm -rf {} +
    tar -C "$work/$1" --sparse --sort=name --owner=0 --group=0 -cf - . | xz -T0 -6 > "$work/packed/$1.tar.xz"
    rm -rf "${work:?}/$1"
}

# Left out: tests, image and video models, the server in Rust, and what needs torch 2.14 or CUTLASS for Python: the
# prefix tree in Rust (SGLang then uses its own in Python) and a product for Blackwell, imported before the GPU is known.
wheel "sglang-$version-cp312-*.whl" "sglang==$version" "$work/sglang"
rm -rf "$work"/sglang/sglang/{multimodal_gen,test/manual}
rm -f "$work"/sglang/sglang/srt/rust_extensions/_{bench,server}.*.so "$work"/sglang/sglang/srt/mem_cache/rust_tree_core/*.so
dual=$work/sglang/sglang/srt/layers/dual_gemm.py
if [ -f "$dual" ]; then
    sed -i 's/^        if not is_cuda():$/        if not is_cuda() or torch.cuda.get_device_capability()[0] < 10:/' "$dual"
    grep -q 'get_device_capability()\[0\] < 10' "$dual"
fi
cp -r "$here/stub/." "$work/sglang/"
pack sglang

wheel "sglang_kernel-$kernels-*.whl" "sglang-kernel==$kernels" "$work/kernels"
rm -rf "$work"/kernels/sgl_kernel/{sm100,infllm_ops.*,flashmla_ops.*}
mv "$work/kernels/sgl_kernel/flash_ops.abi3.so" "$work/flash_ops"
"$python" "$here/keep_hopper_kernels.py" "$work/flash_ops" "$work/kernels/sgl_kernel/flash_ops.abi3.so"
rm "$work/flash_ops"
pack kernels

"$python" -m pip --quiet --disable-pip-version-check install --target "$work/packages" "${target[@]}" \
    --requirement "$here/packages.txt"
rm -rf "$work"/packages/{bin,share} "$work"/packages/torch_memory_saver_*_cu12.abi3.so
find "$work/packages" -name '*.so*' -exec strip --strip-unneeded {} + 2> /dev/null || true
pack packages

# KV between engines, without kernels for experts and ways to cloud stores.
wheel "nixl_cu13-$nixl-cp312-*.whl" "nixl-cu13==$nixl" "$work/nixl"
wheel "nixl-$nixl-*.whl" "nixl==$nixl" "$work/nixl"
rm -rf "$work"/nixl/{nixl_ep_cu13,nixl_cu13.scripts,nixl_cu13.libs/nixl,nixl_cu13-*.data}
find "$work"/nixl/.nixl_cu13.mesonpy.libs/plugins -name '*.so' ! -name libplugin_UCX.so -delete
rm -f "$work"/nixl/nixl_cu13.libs/lib{aws,azure,s2n,xml2,gusli}* "$work"/nixl/nixl_cu13.libs/ucx/libucx_perftest*
pack nixl

wheel "ai_dynamo_runtime-$runtime-*.whl" "ai-dynamo-runtime==$runtime" "$work/runtime"
rm -rf "$work"/runtime/*.dist-info/sboms
strip --strip-unneeded "$work"/runtime/dynamo/_core.abi3.so
pack runtime

"$here/split.sh" "$work/packed" "$pieces"
