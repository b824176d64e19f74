#!/usr/bin/env bash
# Makes an environment with SGLang and Baton from the pieces of prepare.sh, on a machine that has torch and no network.
#
#   unpack.sh PIECES [ENVIRONMENT=.venv-sglang-gpu]
#
# PIECES is the directory of prepare.sh, or that of one piece: pieces may arrive one by one, and the last one is
# unpacked with all. PYTHON is the Python that has torch. Run again, it does nothing.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${2:-$root/.venv-sglang-gpu}
python=${PYTHON:-python3}
if [ -f "$venv/env.sh" ]; then
    exit 0
fi
mkdir -p "$venv/pieces"
find "$1" -name 'piece.*-of-*' -exec cp {} "$venv/pieces/" \;
first=$(compgen -G "$venv/pieces/piece.*" | head -1)
count=${first##*-of-}
there=$(find "$venv/pieces" -name 'piece.*' | wc -l)
if [ "$there" -lt "$count" ]; then
    echo "$there of $count pieces"
    exit 0
fi

"$python" -m venv --without-pip "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
for number in $(seq "$count"); do
    cat "$venv/pieces/piece.$number-of-$count"
done | tar -C "$venv/pieces" -xf -
jobs=()
for archive in "$venv"/pieces/*.tar.xz; do
    where=$packages
    [ "$(basename "$archive")" = cache.tar.xz ] && where=$venv/cache && mkdir -p "$where"
    (tar -C "$where" -xJf "$archive" 2> /dev/null || "$python" -m tarfile -e "$archive" "$where") &
    jobs+=($!)
done
for job in "${jobs[@]}"; do
    wait "$job"
done
rm -rf "$venv/pieces"
# The packages of the Python that has torch, after ours.
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$packages/torch.pth"
"$venv/bin/python" -m compileall -q -j 0 "$packages" > /dev/null 2>&1 || true
"$here/environment.sh" "$venv"
