#!/usr/bin/env bash
# Run everything that needs a GPU for docs/speed.md, in about twenty minutes: tests of operations, throughput table,
# scaling, new image sizes, and profiles.
#   benchmarks/run_all.sh [folder for the results, default $OUT or benchmarks/results]
set -u
cd "$(dirname "$0")/.."
out="${1:-${OUT:-benchmarks/results}}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Not timed, in parallel.
timeout 400 python3 -m pytest tests/ops tests/layers tests/inference -q --maxfail 12 -k "not compiles" >"$out/tests.txt" 2>&1 &
for model in svit_nano sparseformer_nano; do
  timeout 400 python3 benchmarks/check_compiled_training.py $model --steps 200 --ops none all >"$out/compiled_$model.txt" 2>&1 &
done
wait
tail -n 12 "$out/tests.txt" "$out"/compiled_*.txt
# Timed.
timeout 900 python3 benchmarks/gpu_table.py --out "$out" --minutes 10 --profiles 2>&1 | tee "$out/table.txt"
timeout 120 python3 benchmarks/gpu_table.py --out "$out" --scaling 2>&1 | tee "$out/scaling.txt"
timeout 300 python3 benchmarks/new_sizes.py 2>&1 | tee "$out/new_sizes.txt"
timeout 40 python3 benchmarks/short_attention.py 2>&1 | tee "$out/short_attention.txt"
for mode in "--mode inference" "--mode train"; do
  # shellcheck disable=SC2086
  timeout 60 python3 benchmarks/profile_gpu.py svit_small paca_small sparseformer_tiny vt_resnet50 $mode --rows 12 2>&1 |
    tee -a "$out/profile.txt"
done
