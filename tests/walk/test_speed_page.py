"""docs/speed.md is generated from benchmarks/results/*.json."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools/make_speed.py"
MACHINE = {"device": "NVIDIA H200", "threads": 8, "torch": "2.11.0", "date": "2026-01-01", "commit": "abc"}
ROW = {
    "model": "svit_small", "size": 224, "batch": 128, "mode": "train", "compiled": True, "dtype": "bfloat16",
    "channels_last": True, "optimized": False, "cuda_graph": False, "images_per_second": 4000.4, "spread": 0.012,
    "madds": 4.34e9, "tflops": 104.2, "fraction_of_ceiling": 0.13, "peak_bytes": 7 * 2**30,
}  # fmt: skip


def test_speed_page_is_up_to_date():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_state_their_conditions(tmp_path, monkeypatch):
    spec = spec_from_file_location("make_speed", SCRIPT)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    ceilings = {"bfloat16": {"tflops": 790.0, "gbytes": 4300.0}}
    document = {"command": "saccade bench svit_small", "machine": MACHINE, "ceilings": ceilings, "rows": [ROW]}
    (tmp_path / "one.json").write_text(json.dumps(document))
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": [ROW | {"column": "compiled training"}]}))
    plain = ROW | {"mode": "inference", "batch": 8}
    sizes = [plain | {"size": size, "seconds": seconds} for size, seconds in ((224, 0.008), (1024, 0.02))]
    (tmp_path / "three.json").write_text(json.dumps(document | {"rows": sizes}))
    text = script.page()
    assert "batch 8; the number of pixels grows by a factor of 20.9." in text
    assert "| `svit_small` | 1.000 | 2.500 | 2.5 |" in text
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": [ROW | {"column": "CUDA graph"}]}))
    script.draw()
    assert [path.name for path in sorted(tmp_path.glob("*.png"))] == ["three.png", "two.png"]
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": [ROW | {"column": "compiled training"}]}))
    text = script.page()
    assert "![Chart of the measurements two](../benchmarks/results/two.png)" in text
    assert "NVIDIA H200, torch 2.11.0, 2026-01-01, commit abc; ceiling 790.00 TFLOP/s in bfloat16" in text
    assert "| `svit_small` | 224 | 128 | train, compiled, bfloat16, channels-last | 4,000.4 | 1 |" in text
    assert "| images/s | `svit_small` |" in text
    assert "| compiled training | 4,000 (7.0 GiB) |" in text
    assert "Measured at commit" not in text
    assert "first call" not in text.partition("## two")[2]
    earlier = [ROW | {"column": "eager"}, ROW | {"column": "CUDA graph", "commit": "fed"}]
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": earlier}))
    assert "Measured at commit fed: CUDA graph.\n" in script.page()
    earlier.append(ROW | {"column": "CUDA graph", "model": "paca_small"})
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": earlier}))
    assert "Measured at commit fed: CUDA graph (svit_small).\n" in script.page()
    pair = [
        ROW | {"column": "torch.compile(model)", "first_call": 12.34},
        ROW | {"column": 'torch.compile(model, mode="reduce-overhead")', "images_per_second": 5000.5, "spread": 0.1},
    ]
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": pair}))
    text = script.page()
    assert '- torch.compile(model) / torch.compile(model, mode="reduce-overhead"): `svit_small` 0.80\n' in text
    assert '| torch.compile(model, mode="reduce-overhead") | 5,000 ±10 % (7.0 GiB) |' in text
    assert "| first call, s | `svit_small` |\n|---|---|\n| torch.compile(model) | 12.3 |" in text
    pair[1]["commit"] = "fed"  # rows of two commits are not compared
    (tmp_path / "two.json").write_text(json.dumps(document | {"rows": pair}))
    assert "Ratios" not in script.page()
    assert "before saccade.ops" not in script.page()
    older = document | {"machine": MACHINE | {"commit": "c60fb0b"}}
    (tmp_path / "one.json").write_text(json.dumps(older))
    text = script.page()
    assert "Some results are older than the code" in text
    assert "## one\n\nMeasured before saccade.ops.\n" in text
    assert "## two\n\nNVIDIA" in text
    for name in ("cpu", "h200"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    headings = [line for line in script.page().splitlines() if line.startswith("## ")]
    assert headings[-5:] == ["## NVIDIA H200", "## CPU", "## one", "## three", "## two"]
