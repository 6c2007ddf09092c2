#!/usr/bin/env bash
# Every figure of docs/speed.md that needs a GPU, in about eight minutes: kernels against their twins, the table, scaling.
#   bench/run_all.sh [folder for the results, default $OUT or bench/results]
set -u
cd "$(dirname "$0")/.."
out="${1:-${OUT:-bench/results}}"
mkdir -p "$out"
export PYTHONPATH="$PWD" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.inductor}"
timeout 100 python3 -m pytest tests/kernels tests/deploy -q -x -k "not compiles" 2>&1 | tail -15 | tee "$out/kernels.txt"
timeout 130 python3 bench/gpu_table.py --warm 2>&1 | tail -20 | tee "$out/warm.txt"
timeout 330 python3 bench/gpu_table.py --out "$out" --minutes 5 2>&1 | tee "$out/table.txt"
