"""Print docs/results.md from docs/results/*.json, which `saccade train` wrote as result.json.

python tools/make_results.py --add runs/svit_nano_cifar10     # take a run's result into docs/results
python tools/make_results.py --add runs/* --note "all at once"  # and say beside each what its figures do not
python tools/make_results.py                                  # write docs/results.md
python tools/make_results.py --check                          # fail if it is out of date

python tools/make_results.py --add runs/r18 --variant "60 epochs"  # kept beside the usual run of that model

A run with a teacher is kept beside the run of the same model without one.
"""

import argparse
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
HEADER = """# Results

Printed by `python tools/make_results.py` from `docs/results/*.json`, which `saccade train` writes after each run; do not
edit. "final" is the last state of a run (the average of the weights where the recipe keeps one), "best" the best
validation on the way, chosen by the same pictures it is measured on. Multiply-adds are of one image at the size used.
A row that says "distilled" had a teacher beside the labels and started from what its note says: it had more help and
more time than the rows without.
"""
# Pictures of a set have its name (tools/make_scenes.py, tools/make_objects.py); CamVid's terms forbid to show its own.
PICTURES = {"camvid": ("segments", "bundled photographs, and what the embedded segmenter, learned from camvid, says")}
COLUMNS = {
    "classification": ("model", "M params", "M multiply-adds", "px", "final top-1", "best top-1", "top-5", "ECE",
                       "epochs", "min", "train images/s", "loader images/s"),
    "segmentation": ("model", "M params", "G multiply-adds", "px", "final mIoU", "best mIoU", "mAcc", "aAcc",
                     "test mIoU", "test aAcc", "epochs", "min", "s/epoch", "train images/s"),
    "detection": ("model", "M params", "px", "box AP", "AP50", "AP75", "mask AP", "AP50", "AP75", "best box AP",
                  "epochs", "min", "train images/s"),
}  # fmt: skip


def add(run: Path, note: str = "", variant: str = "") -> Path:
    """Copy a run's result, without the paths of the machine it ran on."""
    source = run / "result.json" if run.is_dir() else run
    result = json.loads(source.read_text())
    path = result["recipe"]["data"]["path"]
    for group, key in (("data", "path"), ("data", "val_path"), ("model", "checkpoint"), ("distill", "teacher")):
        value = result["recipe"][group][key]
        if value and "/" in value:  # several teachers are separated by commas
            bare = ",".join(Path(part).name for part in value.split(","))
            result["recipe"][group][key] = bare
            result["command"] = result["command"].replace(value, bare)
    result["command"] = re.sub(r"--out \S*/", "--out runs/", result["command"])
    result["data"] = Path(path).name
    result["unreadable_pictures"] = []
    result["note"] = note
    if variant:
        result["variant"] = variant
    if run.is_dir() and (run / "evaluation.json").is_file():  # saccade eval --split test --out RUN
        result["test"] = json.loads((run / "evaluation.json").read_text())
        for key in ("checkpoint", "data", "machine"):
            result["test"].pop(key, None)
    kind = ("_distilled" if taught(result) else "") + ("_" + variant.replace(" ", "_") if variant else "")
    target = DOCS / "results" / f"{result['data']}_{result['model']}{kind}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    return target


def page() -> str:
    results = [json.loads(path.read_text()) for path in sorted((DOCS / "results").glob("*.json"))]
    parts = [HEADER]
    for data, task in dict.fromkeys((result["data"], task_of(result)) for result in results):
        chosen = [result for result in results if (result["data"], task_of(result)) == (data, task)]
        chosen.sort(key=lambda result: -result["final"][result.get("score", "top1")])
        first = chosen[0]
        parts.append(f"## {data}, {task}\n")
        counts = f"{first['train_images']:,} training pictures, {first['val_images']:,} held out"
        classes = "1 class" if first["classes"] == 1 else f"{first['classes']} classes"
        parts.append(f"{classes}, {counts}.\n")
        parts.append(table(task, chosen))
        parts += [footnote(result) for result in chosen]
        name, shown = PICTURES.get(data, (data, f"{data}: pictures, and what the models say"))
        for picture in sorted((DOCS / "pictures").glob(f"{name}.*")):
            parts.append(f"\n![{shown}](pictures/{picture.name})")
        parts.append("")
    if not results:
        parts.append("No results yet.")
    return "\n".join(parts).rstrip() + "\n"


def taught(result: dict) -> bool:
    """Whether a teacher stood beside the labels; such a run stands beside the one without, not in its place."""
    return bool(result.get("recipe", {}).get("distill", {}).get("teacher"))


def name_of(result: dict) -> str:
    variant = f", {result['variant']}" if result.get("variant") else ""
    return f"`{result['model']}`" + (", distilled" if taught(result) else "") + variant


def task_of(result: dict) -> str:
    """Which table a run belongs to; videos are classified like pictures."""
    return result.get("task", "classification").replace("video", "classification")


def table(task: str, results: list[dict]) -> str:
    cells_of = {
        "classification": classification_cells, "segmentation": segmentation_cells, "detection": detection_cells
    }[task]  # fmt: skip
    lines = ["| " + " | ".join(COLUMNS[task]) + " |", "|" + "---|" * len(COLUMNS[task])]
    lines += ["| " + " | ".join(cells_of(result)) + " |" for result in results]
    return "\n".join(lines) + "\n"


def classification_cells(result: dict) -> tuple[str, ...]:
    final, best = result["final"], result["best"]
    loader = result["loader_images_per_s"]
    return (
        name_of(result),
        f"{result['parameters'] / 1e6:.2f}",
        f"{result['multiply_adds'] / 1e6:,.0f}",
        str(result["image_size"]),
        f"**{final['top1']:.2f}**",
        f"{best['top1']:.2f}",
        f"{final['top5']:.2f}",
        f"{final['calibration']:.2f}",
        f"{result['epochs']:g}",
        f"{result['minutes']:.1f}",
        f"{result['train_images_per_s']:,.0f}" if result["train_images_per_s"] else "–",
        f"{loader:,.0f}" if loader else "–",
    )


def segmentation_cells(result: dict) -> tuple[str, ...]:
    final, best, test = result["final"], result["best"], result.get("test")
    speed = result["train_images_per_s"]
    return (
        name_of(result),
        f"{result['parameters'] / 1e6:.2f}",
        f"{result['multiply_adds'] / 1e9:,.1f}",
        str(result["image_size"]),
        f"**{final['miou']:.2f}**",
        f"{best['miou']:.2f}",
        f"{final['macc']:.2f}",
        f"{final['aacc']:.2f}",
        f"{test['miou']:.2f}" if test else "–",
        f"{test['aacc']:.2f}" if test else "–",
        f"{result['epochs']:g}",
        f"{result['minutes']:.1f}",
        f"{result['train_images'] / speed:.2f}" if speed else "–",
        f"{speed:,.0f}" if speed else "–",
    )


def detection_cells(result: dict) -> tuple[str, ...]:
    final, speed = result["final"], result["train_images_per_s"]
    figures = [f"{kind}_{name}" for kind in ("box", "mask") for name in ("ap", "ap50", "ap75")]
    return (
        name_of(result),
        f"{result['parameters'] / 1e6:.2f}",
        str(result["image_size"]),
        *(f"{final[name]:.1f}" if name in final else "–" for name in figures),
        f"{result['best']['box_ap']:.1f}",
        f"{result['epochs']:g}",
        f"{result['minutes']:.1f}",
        f"{speed:,.0f}" if speed else "–",
    )


def footnote(result: dict) -> str:
    machine = result["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    where += f", commit {machine['commit']}" if machine["commit"] else ""  # a copy of the tree without its history
    note = f" ({result['note']})" if result.get("note") else ""
    return f"- {name_of(result)}: {where}{note}: `{result['command']}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--note", default="", help="what is to be known beside the figures of the runs added")
    parser.add_argument("--variant", default="", help="how the runs added differ from the usual one of their model")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for run in args.add or ():
        print(f"took {add(run, args.note, args.variant)}")
    target, text = DOCS / "results.md", page()
    if args.check:
        if not target.is_file() or target.read_text() != text:
            print(f"{target} is out of date: run python tools/make_results.py", file=sys.stderr)
            return 1
        return 0
    target.write_text(text)
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
