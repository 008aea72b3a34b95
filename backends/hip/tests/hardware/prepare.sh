#!/bin/bash
# Fills build/hip with what run_h200.sh needs and the machine with the device lacks: the library that passes HIP calls on
# to CUDA, and hip-python for that machine's Python (3.12 unless the first argument says otherwise). Run it where there
# are a C compiler and a package index.
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
built=$("$python" "$root/tests/simulator/build.py" hip_on_cuda)
rm -rf "$root/build/hip"
mkdir -p "$root/build/hip/lib"
cp "$built/lib/libamdhip64.so" "$root/build/hip/lib/"
"$python" -m pip install --disable-pip-version-check -q --target "$root/build/hip/site" --no-compile \
    --only-binary=:all: --python-version "${1:-3.12}" --implementation cp 'hip-python>=10.0'
du -sh "$root/build/hip"
