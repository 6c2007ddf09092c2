#!/usr/bin/env bash
# Run everything that needs a GPU for docs/speed.md, in about fifteen minutes: kernel tests, throughput table, scaling,
# and profiles.
#   benchmarks/run_all.sh [folder for the results, default $OUT or benchmarks/results]
set -u
cd "$(dirname "$0")/.."
out="${1:-${OUT:-benchmarks/results}}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.inductor}"
# Not timed, in parallel: tests, compiled training, and filling Inductor's caches.
timeout 400 python3 -m pytest tests/ops tests/layers tests/inference -q --maxfail 12 -k "not compiles" >"$out/kernels.txt" 2>&1 &
for model in svit_nano sparseformer_nano; do
  timeout 400 python3 benchmarks/check_compiled_training.py $model --steps 200 --ops none all >"$out/compiled_$model.txt" 2>&1 &
done
timeout 400 python3 benchmarks/gpu_table.py --warm 2>&1 | tail -20 >"$out/warm.txt" &
wait
tail -n 12 "$out/kernels.txt" "$out"/compiled_*.txt "$out/warm.txt"
# Timed.
timeout 400 python3 benchmarks/gpu_table.py --out "$out" --minutes 6 2>&1 | tee "$out/table.txt"
timeout 40 python3 benchmarks/short_attention.py 2>&1 | tee "$out/short_attention.txt"
for mode in "--mode inference" "--mode train"; do
  # shellcheck disable=SC2086
  timeout 60 python3 benchmarks/profile_gpu.py svit_small paca_small sparseformer_tiny vt_resnet50 $mode --rows 12 2>&1 |
    tee -a "$out/profile.txt"
done
