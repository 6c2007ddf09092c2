#!/usr/bin/env bash
# Train five segmenters on CamVid from scratch, in parallel on one GPU, in about nine minutes:
#
#   examples/camvid.sh camvid/ runs
#
# Then: python tools/make_results.py --add runs/*_camvid. Every run has a report.html with figures.
set -u
data=$1 out=$2
names="paca_tiny_paca svit_small_upernet resnet50_fpn resnet50_vt_fpn sparseformer_tiny_sparse"
mkdir -p "$out"
for name in $names; do
  run="$out/${name}_camvid"
  (
    saccade train "recipes/small/${name}_camvid.yaml" --data "$data" --out "$run" --quiet "${@:3}" &&
      saccade eval "$run/last.safetensors" --data "$data" --split test --workers 2 --precision bfloat16 --out "$run"
  ) >"$run.log" 2>&1 &
done
wait
tail -n 30 "$out"/*_camvid.log
