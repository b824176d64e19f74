#!/usr/bin/env bash
# Unpacks the parts of pack.sh that are here, on the GPU machine; parts may come one after the other.
#
#   unpack.sh PARTS [INTO=/opt/baton]      then: . INTO/env.sh
#
# Also makes the command `baton` beside python3, for tests that start it from this checkout.
set -euo pipefail
parts=$(cd "$1" && pwd)
into=${2:-/opt/baton}
source=$(cd "$(dirname "$0")/../.." && pwd)/src
mkdir -p "$into/site" "$into/pieces"
for part in "$parts"/*.tar.xz; do
    [ -f "$part" ] && tar -C "$into/site" -xJf "$part" &
done
for piece in "$parts"/runtime.part.*; do
    if [ -f "$piece" ]; then cp "$piece" "$into/pieces/"; fi
done
if [ -f "$into/pieces/runtime.part.00" ] && [ -f "$into/pieces/runtime.part.01" ] && [ ! -d "$into/site/dynamo" ]; then
    cat "$into"/pieces/runtime.part.* | tar -C "$into/site" -xJf -
fi
wait
cat > "$into/env.sh" <<ENV
export PYTHONPATH=$source:$into/site\${PYTHONPATH:+:\$PYTHONPATH}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
ENV
python=$(python3 -c 'import sys; print(sys.executable)')
printf '#!%s\nimport sys\nfrom baton.cli.main import main\nsys.exit(main())\n' "$python" > "$(dirname "$python")/baton"
chmod +x "$(dirname "$python")/baton"
