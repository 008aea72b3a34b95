#!/bin/bash
# All figures of the cache on one device, from any folder; leaves one JSON file in $OUT (or build/h200-bench). Installs
# nothing. Names limit it to some: h200.sh one classic. Each has a limit of its own, and all together $LIMIT_S (495 s), which
# is not enough for all: what is left over is named as failed, to be run by its name.
# Needs a GPU that nothing else uses, 24 GiB of host memory, and torch for the model beside the transfers.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/../backends/cuda/tests/hardware/env.sh"
raw=$(mktemp -d)
trap 'rm -rf "$site" "$raw"' EXIT
out=${OUT:-$root/build/h200-bench}
mkdir -p "$out"
cd "$root" || exit 1
export DEVIPC_TRIAL_CACHE= PYTHONUNBUFFERED=1
wanted=" ${*:-one one_1 layers classic classic_1 geometries runs small sweep interference footprint control sync gather} "
failed=
step() {
    name=$1 limit=$2
    shift 2
    case $wanted in *" $name "*) ;; *) return ;; esac
    left=$((${LIMIT_S:-495} - SECONDS))
    [ $left -ge 10 ] || { failed="$failed $name"; echo "$name: no time is left"; return; }
    [ $limit -le $left ] || limit=$left
    began=$SECONDS
    timeout --kill-after=5 "$limit" python3 -m devipc bench "$@" --backend cuda --out "$raw/$name.json" >"$raw/$name.log" 2>&1
    status=$?
    echo "$name: status $status, $((SECONDS - began)) s"
    [ $status = 0 ] || { failed="$failed $name"; tail -n 25 "$raw/$name.log"; }
}
# 65,600 tokens are what SGLang gives a pool of 64 Ki: rows that fill no whole blocks of 2 MiB.
moved="--url daemon --rows 65600"
step one 120 transfer $moved --tokens 4096 --page-tokens 64,16 --baselines 5 --in-flight 1,4
step one_1 100 transfer $moved --tokens 4096 --page-tokens 1 --baselines 5 --in-flight 1,4
step layers 80 transfer $moved --tokens 4096 --page-tokens 64,16 --allocation layers --in-flight 1,4
step classic 80 transfer $moved --tokens 4096 --page-tokens 64,16 --allocation classic --in-flight 1,4
step classic_1 40 transfer $moved --tokens 4096 --page-tokens 1 --allocation classic --repetitions 8
step geometries 80 transfer $moved --tokens 4096 --page-tokens 64,16 --geometry tp4,mla --in-flight 1,4
step runs 110 transfer $moved --tokens 4096 --page-tokens 64,16,1 --shape runs --extent-pages 256 --in-flight 1,4
step small 40 transfer $moved --tokens 256 --page-tokens 64,16 --repetitions 200
step sweep 75 transfer $moved --tokens 256,1024,4096,16384 --page-tokens 16
step interference 130 interference --url daemon --tokens 4096 --model decode,decode_launched,prefill --windows 4
step footprint 60 footprint --tier-mib 4096 --rows 65600
step control 40 control --url daemon
step sync 40 sync
case $wanted in *" gather "*)
    timeout --kill-after=5 100 python3 -m benchmarks.gather --out "$raw/gather.json" || failed="$failed gather" ;;
esac
python3 -m benchmarks.bars "$raw" --out "$out/h200.json"
echo "failed:${failed:- none}"
[ -z "$failed" ]
