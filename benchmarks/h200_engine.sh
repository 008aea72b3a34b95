#!/bin/bash
# The reference engine with a random model of the shape of Llama-3-8B, in each deployment, in at most 400 s, from any
# folder; leaves one JSON file in $OUT (or build/h200-bench). Installs nothing. Arguments are passed on to
# `devipc bench engine`. Needs a GPU that nothing else uses, with 80 GiB, 40 GiB of host memory, and torch.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/../backends/cuda/tests/hardware/env.sh"
trap 'rm -rf "$site" "${raw:-}"' EXIT
out=${OUT:-$root/build/h200-bench}
mkdir -p "$out"
cd "$root" || exit 1
export DEVIPC_TRIAL_CACHE= PYTHONUNBUFFERED=1
raw=$(mktemp -d)
timeout --kill-after=10 385 python3 -X faulthandler -m devipc bench engine --backend cuda --model llama-3-8b \
    --out "$raw/engine.json" "$@"
status=$?
[ $status = 0 ] && python3 -m benchmarks.bars "$raw" --out "$out/h200-engine.json"
echo "engine: status $status, $SECONDS s"
exit $status
