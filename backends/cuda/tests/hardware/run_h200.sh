#!/bin/sh
# Runs the checks that need a real device, from any folder, and leaves JSON in $OUT (or build/h200). Installs nothing.
set -eu
root=$(cd "$(dirname "$0")/../../../.." && pwd)
out=${OUT:-$root/build/h200}
mkdir -p "$out"
# Entry points without an installation: metadata alone, in a folder of its own.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
metadata() {
    mkdir -p "$site/$1-0.1.0.dist-info"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0.1.0\n' "$1" > "$site/$1-0.1.0.dist-info/METADATA"
    printf '[devipc.backends]\n%s\n' "$2" > "$site/$1-0.1.0.dist-info/entry_points.txt"
}
metadata devipc 'host = devipc.host.plugin'
metadata devipc_cuda 'cuda = devipc_cuda.plugin'
export PYTHONPATH="$root:$root/backends/cuda:$site${PYTHONPATH:+:$PYTHONPATH}"
cd "$root"
python3 -m backends.cuda.tests.hardware.smoke --out "$out/smoke.json" "$@"
