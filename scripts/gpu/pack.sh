#!/usr/bin/env bash
# Packs what `make test-gpu` needs besides torch, transformers and Triton, for a GPU machine without a network.
#
#   pack.sh PARTS [PYTHON_VERSION=3.12]      100 MB of downloads; PARTS then has site, nixl and runtime (60 MB)
#
# For Linux on x86-64 with CUDA 13. Needs pip, tar, xz and strip. The runtime is in pieces of 29 MB.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1"
parts=$(cd "$1" && pwd)
version=${2:-3.12}
tag=cp${version/./}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=(--quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp --abi "$tag" --abi abi3 --abi none)
for minor in $(seq 34 -1 5); do
    target+=(--platform "manylinux_2_${minor}_x86_64")
done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
pin() { for name; do grep -i -m 1 "^${name//-/[-_]}==" constraints.txt; done; }
pack() {  # NAME DIRECTORY
    find "$2" -name '*.so*' -exec strip --strip-unneeded {} + 2> /dev/null || true
    tar -C "$2" --sort=name --owner=0 --group=0 -cf - . | xz -T0 -6 > "$parts/$1.tar.xz"
}
install() { "${PYTHON:-python3}" -m pip install --target "$work/$1" "${target[@]}" "${@:2}"; }

# shellcheck disable=SC2046
install site $(pin msgspec click pyyaml prometheus_client uvloop httptools aiohttp pyzmq llguidance gguf hypothesis \
    sortedcontainers pytest pytest-timeout pytest-xdist execnet iniconfig pluggy psutil aiohappyeyeballs aiosignal \
    frozenlist multidict propcache yarl attrs idna openai pydantic pydantic_core annotated-types typing-inspection \
    typing_extensions jiter sniffio anyio h11 httpx2 httpcore2 certifi packaging jinja2 markupsafe pygments tqdm \
    truststore) distro
rm -rf "$work"/site/{bin,share}
pack site "$work/site"

install nixl "nixl-cu13==1.5.1"
rm -rf "$work"/nixl/{bin,nixl_ep_cu13,nixl_cu13.scripts,nixl_cu13.libs/nixl}
find "$work"/nixl/.nixl_cu13.mesonpy.libs/plugins -name '*.so' ! -name libplugin_UCX.so -delete
rm -f "$work"/nixl/nixl_cu13.libs/lib{aws,azure,s2n,xml2,gusli}* "$work"/nixl/nixl_cu13.libs/ucx/libucx_perftest*
pack nixl "$work/nixl"

# shellcheck disable=SC2046
install runtime $(pin ai-dynamo-runtime)
rm -rf "$work"/runtime/*.dist-info/{licenses,sboms}
pack runtime "$work/runtime"
split -b 29000000 -d "$parts/runtime.tar.xz" "$parts/runtime.part."
rm "$parts/runtime.tar.xz"
ls -l "$parts"
