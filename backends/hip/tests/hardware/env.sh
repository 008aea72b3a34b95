# Sourced on a machine without an installation: entry points as bare metadata in a folder of their own, and the paths.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
site=$(mktemp -d)
metadata() {
    mkdir -p "$site/$1-0.1.0.dist-info"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0.1.0\n' "$1" > "$site/$1-0.1.0.dist-info/METADATA"
    printf '[devipc.backends]\n%s\n' "$2" > "$site/$1-0.1.0.dist-info/entry_points.txt"
}
metadata devipc 'host = devipc.host.plugin'
metadata devipc_hip 'hip = devipc_hip.plugin'
export ROCM_PATH="${DEVIPC_HIP_FOLDER:-$root/build/hip}"
export PYTHONPATH="$root:$root/backends/hip:$ROCM_PATH/site:$site${PYTHONPATH:+:$PYTHONPATH}"
