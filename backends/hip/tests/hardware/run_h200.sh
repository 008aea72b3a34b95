#!/bin/bash
# Runs the HIP backend on an NVIDIA device, by the library that passes HIP calls on to CUDA, and leaves JSON in $OUT (or
# build/h200-hip). Proves order of calls, lifetimes and real asynchrony; says nothing about AMD devices. Installs nothing:
# prepare.sh has filled build/hip. Names limit it to some: run_h200.sh conformance. Each has a limit of its own.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap 'rm -rf "$site"' EXIT
out=${OUT:-$root/build/h200-hip}
mkdir -p "$out"
cd "$root" || exit 1
export DEVIPC_TRIAL_CACHE= PYTHONUNBUFFERED=1
wanted=" ${*:-conformance demo handover} "
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
demo() {
    for strategy in stream_memop host_flag polling event; do
        python3 -c 'from devipc.cli import main; main()' demo --backend hip --strategy $strategy --json >"$out/demo_$strategy.json" || {
            rm "$out/demo_$strategy.json"
            [ $strategy = event ] || return 1 # refused where events do not prove themselves
        }
    done
}
export -f demo
export out
step conformance 440 python3 -m devipc conformance run --profile backends.hip.tests.profile:forwarded --jobs 8 --large \
    --results "$out/conformance.json"
step demo 60 bash -c demo
step handover 60 python3 -m benchmarks.device_handover --backend hip --out "$out/handover.json"
python3 -m backends.hip.tests.hardware.collect "$out" "$out/results"
echo "failed:${failed:- none}"
[ -z "$failed" ]
