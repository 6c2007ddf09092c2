#!/usr/bin/env bash
# Every figure of docs/speed.md that needs a GPU, in about fifteen minutes: kernels against their twins, the table, scaling,
# and where the time goes.
#   benchmarks/run_all.sh [folder for the results, default $OUT or benchmarks/results]
set -u
cd "$(dirname "$0")/.."
out="${1:-${OUT:-benchmarks/results}}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.inductor}"
# What needs no quiet card: the tests, compiled training update by update, and filling the compiler's caches.
timeout 400 python3 -m pytest tests/kernels tests/layers tests/deploy -q --maxfail 12 -k "not compiles" >"$out/kernels.txt" 2>&1 &
for model in svit_nano sparseformer_nano; do
  timeout 400 python3 benchmarks/check_compiled_training.py $model --updates 200 --kernels default >"$out/compiled_$model.txt" 2>&1 &
done
timeout 400 python3 benchmarks/gpu_table.py --warm 2>&1 | tail -20 >"$out/warm.txt" &
wait
tail -n 12 "$out/kernels.txt" "$out"/compiled_*.txt "$out/warm.txt"
# What does.
timeout 400 python3 benchmarks/gpu_table.py --out "$out" --minutes 6 2>&1 | tee "$out/table.txt"
timeout 40 python3 benchmarks/short_attention.py 2>&1 | tee "$out/short_attention.txt"
for how in "--mode inference" "--mode train"; do
  # shellcheck disable=SC2086
  timeout 60 python3 benchmarks/profile_gpu.py svit_small paca_small sparseformer_tiny vt_resnet50 $how --rows 12 2>&1 |
    tee -a "$out/profile.txt"
done
