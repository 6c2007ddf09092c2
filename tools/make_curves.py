"""Draw docs/figures/sparse_curves.png: training curves of the sparse detector, from the metrics.csv of its runs
in docs/results/curves.

python tools/make_curves.py
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1] / "docs"
RUNS = {
    "rendered scenes, `sparseformer_nano`": ["scenes_first_round", "scenes_second_round"],
    "nuclei, `sparseformer_tiny`": ["nuclei"],
}
LOSS, AP50, AP = "#9aa4b1", "#1f6feb", "#d1495b"


def read_metric(rows: list[dict[str, str]], key: str, start: float) -> tuple[list[float], list[float]]:
    """Epochs, offset by `start`, and the values of a metric."""
    points = [(start + float(row["epoch"]), float(row[key])) for row in rows if row[key]]
    return [epoch for epoch, _ in points], [value for _, value in points]


def main() -> None:
    figure, axes = pyplot.subplots(1, len(RUNS), figsize=(11, 4), layout="constrained")
    for axis, (title, names) in zip(axes, RUNS.items(), strict=True):
        right, start = axis.twinx(), 0.0
        for number, name in enumerate(names):
            with (DOCS / "results/curves" / f"{name}.csv").open() as file:
                rows = list(csv.DictReader(file))
            axis.plot(
                *read_metric(rows, "train_loss", start), color=LOSS, label="training loss" if not number else None
            )
            for key, colour, label in (("val_box_ap50", AP50, "box AP50"), ("val_box_ap", AP, "box AP")):
                epochs, values = read_metric(rows, key, start)
                right.plot(epochs, values, "o-", color=colour, label=label if not number else None)
                right.annotate(f"{values[-1]:.1f}", (epochs[-1], values[-1]), (-4, 6), textcoords="offset points",
                               ha="right", color=colour)  # fmt: skip
            start += float(rows[-1]["epoch"])
            if number + 1 < len(names):
                axis.axvline(start, color=LOSS, linestyle=":")
                axis.annotate("second round,\nfrom these weights", (start, 0.5), (2, 0), color="#60686f", fontsize=8,
                              xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
        axis.set(title=title.replace("`", ""), xlabel="epochs", ylabel="loss (DETR's, all layers)", ylim=(0, None))
        right.set(ylabel="% on held-out images", ylim=(0, 100))
        for part in (axis, right):
            part.spines["top"].set_visible(False)
    lines = [handle for part in (axis, right) for handle in part.get_legend_handles_labels()[0]]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False)
    target = DOCS / "figures/sparse_curves.png"
    figure.savefig(target, dpi=110)
    print(f"wrote {target}, {target.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
