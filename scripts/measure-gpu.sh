#!/usr/bin/env bash
# Checks the CUDA executor on a GPU, then times it: the commands of docs/src/results/gpu.md, one after another on one card.
#
#   scripts/measure-gpu.sh FOLDER [checks|times]
#
# Raw output goes to FOLDER; docs/results has that of an H200. BIN names a folder with the programs oasis, gpu, gpu_bridge and
# kernel_check where they are not to be built here. The times take 7 minutes on an H200; the larger shapes want 80 GiB of device
# memory and 16 GiB of the host's.
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "${1:?usage: scripts/measure-gpu.sh FOLDER [checks|times]}"
out="$(cd "$1" && pwd)"
what="${2:-checks times}"
cd "$root"

oasis="${BIN:-target/release}/oasis"
if [ -z "${BIN:-}" ]; then
    cargo build --release -p oasis-cli
fi

test_binary() {
    if [ -n "${BIN:-}" ]; then "$BIN/$1"; else cargo test --release -p oasis-tests --test "$1"; fi
}

kernel_check() {
    if [ -n "${BIN:-}" ]; then "$BIN/kernel_check"; else cargo run --release -p oasis-cuda --example kernel_check; fi
}

checks() {
    failed=0
    test_binary gpu >"$out/gpu.txt" 2>&1 || failed=1
    test_binary gpu_bridge >"$out/gpu_bridge.txt" 2>&1 || failed=1
    kernel_check >"$out/kernel_check.txt" 2>&1 || failed=1
    grep -h "test result" "$out/gpu.txt" "$out/gpu_bridge.txt" || failed=1
    grep -h "checks, " "$out/kernel_check.txt" || failed=1
    return "$failed"
}

run() {
    { echo; echo "\$ oasis $*"; "$oasis" "$@" || echo "exit code $?"; } 2>&1 | tee -a "$out/times.txt"
}

times() {
    { nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader; date -u; } |
        tee "$out/times.txt"
    shape=(--shape qwen3-8b --host-memory 12GiB --alias-host 4)
    limit=(--hbm-limit 80GiB)
    policy=(--set summarizer.kind=quest-fp8 --set kv.draft_blocks=128)
    cap=(--set selector.fetch_ratio=0.03)

    # Closed loops.
    run bench serve-sim "${shape[@]}" "${limit[@]}" "${policy[@]}" "${cap[@]}" --concurrency 128 --seconds 60
    run bench serve-sim "${shape[@]}" "${limit[@]}" "${policy[@]}" "${cap[@]}" --concurrency 16,1 --seconds 20
    run bench serve-sim "${shape[@]}" "${limit[@]}" --dense --concurrency 128,16,1 --seconds 20
    run bench serve-sim "${shape[@]}" "${limit[@]}" "${policy[@]}" "${cap[@]}" --input 32000 --concurrency 128 --seconds 60
    run bench serve-sim "${shape[@]}" "${limit[@]}" "${policy[@]}" "${cap[@]}" --input 32000 --concurrency 1 --seconds 20
    run bench serve-sim "${shape[@]}" "${limit[@]}" --dense --input 32000 --concurrency 128,1 --seconds 20

    # Decode steps, and what the cap does.
    run bench decode "${shape[@]}" "${limit[@]}" "${policy[@]}" --batch 1,16,64,112,128 --dense --fetch-ratio 0.03,0.05 \
        --steps 24
    run bench decode "${shape[@]}" "${limit[@]}" "${policy[@]}" --batch 160 --fetch-ratio 0.01,0.05,0.1,0.25,1 --steps 8

    # What looking ahead costs.
    ahead=(--batch 64 --fetch-ratio 0.001 --steps 24)
    run bench decode "${shape[@]}" --batch 64 --context 2048 --dense-only --steps 24
    run bench decode "${shape[@]}" --set summarizer.kind=quest-fp8 "${ahead[@]}" --set predictor.kind=last-query
    run bench decode "${shape[@]}" --set summarizer.kind=quest-fp8 "${ahead[@]}"
    run bench decode "${shape[@]}" "${policy[@]}" "${ahead[@]}" --profile
    run bench decode "${shape[@]}" --set summarizer.kind=quest-int4 --set kv.draft_blocks=128 "${ahead[@]}"

    run bench prefill --shape qwen3-8b
    run bench decode --shape qwen3-30b-a3b --host-memory 12GiB --alias-host 4 --set kv.draft_blocks=128 --batch 1,16,64 \
        --fetch-ratio 0.05 --steps 16
    run bench kernels --shape qwen3-8b --batch 64
}

for part in $what; do
    case "$part" in
    checks | times) "$part" ;;
    *) echo "measure-gpu: expected checks or times, found $part" >&2 && exit 2 ;;
    esac
done
