#!/bin/bash
# Runs the checks that need a real device, from any folder, and leaves JSON in $OUT (or build/h200). Installs nothing.
# Names limit it to some: run_h200.sh death sticky. Each has a limit of its own, so that one that hangs costs no other.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap 'rm -rf "$site"' EXIT
out=${OUT:-$root/build/h200}
mkdir -p "$out"
cd "$root" || exit 1
export DEVIPC_TRIAL_CACHE= PYTHONUNBUFFERED=1
wanted=" ${*:-smoke submission pending_wait sticky namespaces torch_session death conformance demo handover sessions tensors hicache hicache_scenarios} "
failed=
step() {
    name=$1 limit=$2
    shift 2
    case $wanted in *" $name "*) ;; *) return ;; esac
    began=$SECONDS
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    echo "$name: status $status, $((SECONDS - began)) s"
    [ $status = 0 ] || { failed="$failed $name"; tail -n 15 "$out/$name.log"; }
}
check() { step "$1" "$2" python3 -m "backends.cuda.tests.hardware.$1" --out "$out/$1.json"; }
demo() {
    for strategy in stream_memop host_flag polling event; do
        python3 -c 'from devipc.cli import main; main()' demo --backend cuda --strategy $strategy --json >"$out/demo_$strategy.json" || return 1
    done
}
hicache() {
    bad=0
    for part in latency death; do
        timeout --kill-after=5 240 python3 -m backends.cuda.tests.hardware.hicache_$part --out "$out/hicache_$part.json" || bad=1
    done
    return $bad
}
export -f demo hicache
export out
check smoke 120
check submission 90
check pending_wait 60
check sticky 60
check namespaces 150
check torch_session 90
check death 330
step conformance 300 python3 -m pytest -v --timeout 120 -p no:cacheprovider --pyargs devipc.conformance -p devipc.conformance.plugin \
    --devipc-profile backends.cuda.tests.profile:whole_device --devipc-exclusive --devipc-large \
    --devipc-results "$out/conformance.json"
step demo 90 bash -c demo
step handover 90 python3 -m benchmarks.device_handover --backend cuda --out "$out/handover.json"
step sessions 60 python3 -m devipc bench sync --backend cuda --repetitions 500 --out "$out/sessions.json"
step tensors 60 python3 -m pytest -v -p no:cacheprovider tests/integrations -m hardware
step hicache 420 bash -c hicache
check hicache_scenarios 345
python3 -m backends.cuda.tests.hardware.collect "$out" "$out/results"
echo "failed:${failed:- none}"
[ -z "$failed" ]
