"""Print docs/speed.md from benchmarks/results/*.json, which `saccade bench --out benchmarks/results` and benchmarks/run_all.sh write.

python docs/make_speed.py           # write docs/speed.md
python docs/make_speed.py --check   # fail if it is out of date
python docs/make_speed.py --draw    # first draw the pictures of what benchmarks/run_all.sh wrote
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
HEADER = """# Speed

The tables below are printed by `python docs/make_speed.py` from `benchmarks/results/*.json`; do not edit this page. How the
code came to be as fast as it is, step by step with predictions and what was tried and lost, is in `benchmarks/NOTES.md`.

## Making a model fast

```python
fast = saccade.optimize(model, dtype=torch.bfloat16, memory_format=torch.channels_last)  # on a GPU
fast = saccade.optimize(model)  # on a CPU, in float32
```

`saccade.optimize` returns a copy that only answers: batch norms are folded into the layers beside them (the flow of
data decides which, by tracing; a norm that no layer can take becomes one multiplication and one sum), weights are
frozen and cast, and images are cast at the door. It works on saccade's models and segmenters and on timm's models. The
answer is the original's within 1e-10 of its size in float64, 1e-4 in float32 and 5e-2 in bfloat16 or float16; the
original is not touched. Coordinates (SparseFormer's regions and points) stay float32.

In half precision on an NVIDIA GPU, channels last, a folded convolution takes its bias, the shortcut and the ReLU along
(cuDNN's fused call), in VT's blocks and in the dense heads; the 7x7 stems of VT and SparseFormer run over blocks of 2x2
pixels, in training too. Under `torch.compile` the norm of an inference pass is folded on the way, for the same call.
None of it happens in a layer that a hook listens to; the fused call not in runs that must repeat exactly
(`torch.use_deterministic_algorithms(True)`) either.

| where | what helps |
|---|---|
| GPU, many images | `optimize(model, dtype=torch.bfloat16, memory_format=torch.channels_last)`, then `torch.compile` |
| GPU, one shape, Python in the way | `optimize(..., cuda_graph=True)`: the launches of the first batch are replayed |
| the same with fusion | `torch.compile(saccade.optimize(model), mode="reduce-overhead")` |
| CPU | nothing to do: inference in float32 takes oneDNN's fused layers by itself, a few images at a time |
| training | `torch.compile(model)`, bfloat16 autocast, `model.to(memory_format=torch.channels_last)` |
| training, eager | `with torch.autograd.set_multithreading_enabled(False): loss.backward()`, see below |
| training, one shape | `torch.cuda.make_graphed_callables(model, (images,))`, in `autocast(…, cache_enabled=False)` |

Eager inference under autocast on a GPU casts all weights of one of saccade's models together, anew for every call: of
the launches of PaCa-S, for which the GPU waits, 239 of 431 are left (`python benchmarks/count_ops.py paca_small --kernels`).

For a GPU, autograd goes back in a thread of its own, on another core, where nothing of what the way there left is at
hand (PyTorch means to change that). In eager steps the GPU waits for it: on the H200 below, SparseFormer-T took 46 ms a
step of 128 images with that thread and 30 without (`python benchmarks/waiting.py sparseformer_tiny --batches 128`).
`saccade train` and `saccade bench` go back in the thread that went forward; in a loop of your own, the line above does.

`saccade train` and `saccade bench` compile with one option more, small steps that do not wait for one another in one
launch; so does `torch.compile(model, **compile_options("reduce-overhead"))`, `compile_options` of `saccade.inference.compile`.

A CUDA graph has one shape: another batch size raises an error that says so; `reset()` lets another shape in.

## Measuring

```bash
saccade bench svit_small swin_tiny_patch4_window7_224 --mode inference train --run eager compiled --dtype bfloat16
saccade bench sparseformer_tiny swin_tiny_patch4_window7_224 --scaling --batch 4        # cost against pixels
saccade bench vt_resnet50 resnet50 --optimize both --memory-format contiguous channels_last
```

All cases take turns in one run, so that a busy moment hits all alike; read the ratios. The spread is half the distance
between the quartiles. TFLOP/s count two operations a multiply-add, three times as many in training; the ceiling is a
large matrix product in the same type on the same machine. `--out DIR` keeps JSON and a picture; results under
`benchmarks/results` end up on this page.
"""


def page() -> str:
    parts = [HEADER]
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        machine = document["machine"]
        threads = "" if "nvidia" in machine["device"].lower() else f", {machine['threads']} threads"
        parts.append(f"## {path.stem}\n")
        where = f"{machine['device']}{threads}, torch {machine['torch']}, {machine['date']}, commit {machine['commit']}"
        parts.append(f"{where}{ceilings(document)}: `{document['command']}`\n")
        rows = document["rows"]
        parts.append(pivot(rows) if is_table(rows) else by_size(rows) if is_scaling(rows) else listing(rows))
        parts.extend(older(rows))
        if document.get("notes"):
            parts.append("Left out: " + "; ".join(document["notes"]) + "\n")
        if path.with_suffix(".png").is_file():
            parts.append(f"![{path.stem}](../bench/results/{path.stem}.png)\n")
    return "\n".join(parts).rstrip() + "\n"


def older(rows: list[dict]) -> list[str]:
    """Which columns come from another run than the rest, at another commit."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        if "commit" in row and row["column"] not in commits.setdefault(row["commit"], []):
            commits[row["commit"]].append(row["column"])
    return [f"From another run, commit {commit}: {'; '.join(names)}.\n" for commit, names in commits.items()]


def ceilings(document: dict) -> str:
    known = [f"{value['tflops']:,.2f} TFLOP/s in {dtype}" for dtype, value in document["ceilings"].items()]
    return "; ceiling " + ", ".join(known) if known else ""


def is_table(rows: list[dict]) -> bool:
    """Whether models were measured in several ways, as benchmarks/gpu_table.py does."""
    return bool(rows) and "column" in rows[0]


def is_scaling(rows: list[dict]) -> bool:
    """Whether models were measured in one way at several sizes."""
    return len({row["size"] for row in rows}) > 1 and len({how(row) for row in rows}) == 1


def by_size(rows: list[dict]) -> str:
    """Models down, sizes across: milliseconds of an image, and how often those of the smallest size."""
    sizes = sorted({row["size"] for row in rows})
    found = {(row["model"], row["size"]): 1e3 * row["seconds"] / row["batch"] for row in rows}
    growth = (sizes[-1] / sizes[0]) ** 2
    lines = [
        f"Milliseconds an image, {how(rows[0])}, batch {rows[0]['batch']}; pixels grow by {growth:.1f}.\n",
        "| model | " + " | ".join(f"{size} px" for size in sizes) + " | grows by |",
        "|" + "---|" * (len(sizes) + 2),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [found.get((model, size)) for size in sizes]
        cells = ["–" if value is None else f"{value:.3f}" for value in own]
        ratio = f"{own[-1] / own[0]:.1f}" if own[0] and own[-1] else "–"
        lines.append(f"| `{model}` | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines) + "\n"


def draw() -> None:
    """Accuracy against recorded speed for a table, cost against pixels for a scaling run, beside their JSON."""
    from saccade.benchmark.plot import plot_accuracy, plot_scaling
    from saccade.models.paper import COMPARED, REPORTED

    accuracy = {name: paper.top1 for name, paper in REPORTED.items() if paper.top1} | COMPARED
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        rows, title = document["rows"], f"{document['machine']['device']}, {document['machine']['date']}"
        if is_table(rows):
            recorded = [row for row in rows if row["column"] == "CUDA graph"]
            plot_accuracy(recorded, accuracy, f"{title}: recorded, batch 128, 224 px", path.with_suffix(".png"))
        elif is_scaling(rows):
            plot_scaling(rows, f"{title}: {how(rows[0])}, batch {rows[0]['batch']}", path.with_suffix(".png"))


def pivot(rows: list[dict]) -> str:
    """Models down, columns across: images a second, and the memory of training."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    found = {(row["model"], row["column"]): row for row in rows}

    def cell(model: str, column: str) -> str:
        row = found.get((model, column))
        if row is None:
            return "–"
        memory = f" ({row['peak_bytes'] / 2**30:.1f} GiB)" if row["mode"] == "train" and row["peak_bytes"] else ""
        return f"{row['images_per_second']:,.0f}{memory}"

    lines = ["| images/s | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines.append(f"| `{model}` | " + " | ".join(cell(model, column) for column in columns) + " |")
    return "\n".join(lines) + "\n"


def listing(rows: list[dict]) -> str:
    """One line a row."""
    head = (
        "model",
        "px",
        "batch",
        "how",
        "images/s",
        "± %",
        "ratio",
        "G multiply-adds",
        "TFLOP/s",
        "% of ceiling",
        "MiB",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (
            f"`{row['model']}`",
            str(row["size"]),
            str(row["batch"]),
            how(row),
            f"{row['images_per_second']:,.1f}",
            f"{100 * row['spread']:.0f}",
            f"{row['ratio']:.2f}" if "ratio" in row else "–",
            f"{row['madds'] / 1e9:.2f}",
            f"{row['tflops']:.3f}",
            f"{100 * row['share_of_ceiling']:.0f}" if row["share_of_ceiling"] else "–",
            f"{row['peak_bytes'] / 2**20:,.0f}" if row["peak_bytes"] else "–",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def how(row: dict) -> str:
    run = " with ".join(["compiled"] * row["compiled"] + ["CUDA graph"] * row["cuda_graph"]) or "eager"
    words = [row["mode"], run, row["dtype"]]
    return ", ".join(words + ["channels-last"] * row["channels_last"] + ["optimised"] * row["optimized"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if args.draw:
        draw()
    target, text = HERE / "speed.md", page()
    if args.check:
        if not target.is_file() or target.read_text() != text:
            print(f"{target} is out of date: run python docs/make_speed.py", file=sys.stderr)
            return 1
        return 0
    target.write_text(text)
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
