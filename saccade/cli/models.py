"""`saccade models`: list models with measured and published cost."""

import argparse
from pathlib import Path

from saccade._errors import UsageError
from saccade.cli import MAX_SIDE, integer, number

HELP = "list the models with parameters and multiply-adds, measured and as published"
EXAMPLE = "saccade models 'svit*' --size 384"
FLAGS = ("set",)  # of the shared ones
PLOT_FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tiff", "eps")  # of matplotlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="", help="shell wildcard, such as 'svit*'")
    parser.add_argument("--size", type=integer(1, MAX_SIDE), help="image size in pixels (default: the paper's)")
    families = "svit, paca, sparseformer, sparseformer_v2, video_sparseformer or vt"
    parser.add_argument("--family", help=f"only this family: {families}")
    parser.add_argument(
        "--per-stage", action="store_true", help="also print parameters and multiply-adds of every part"
    )
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        help="plot printed top-1 against cost, beside the methods the papers compare; .png, .svg, .pdf, .jpg or .webp",
    )
    parser.add_argument(
        "--max-params", type=number(0, exclusive=True), metavar="M", help="only models of at most M million parameters"
    )


def plot_file(text: str) -> Path:
    """The type of --plot."""
    path = Path(text)
    if path.suffix.removeprefix(".").lower() not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file name with .{', .'.join(PLOT_FORMATS)}, got {text}")
    return path


def run(args: argparse.Namespace) -> int:
    from saccade.cli import print_json, print_table, settings

    rows = describe(args.pattern, args.family, args.size, args.max_params, settings(args.set))
    if not rows:
        raise UsageError(f"no model matches {args.pattern or args.family!r}. `saccade models` lists all models.")
    if args.plot:
        plot_families(sorted({row["family"] for row in rows}), args.plot)
    if args.json:
        if not args.per_stage:
            rows = [{key: value for key, value in row.items() if key != "parts"} for row in rows]
        print_json(rows)
        return 0
    cells: list[tuple[str, ...] | None] = []
    for i, row in enumerate(rows):
        if i and row["family"] != rows[i - 1]["family"]:
            cells.append(None)
        values = (
            row["size"],
            f"{row['params'] / 1e6:.2f}",
            row["paper_params"],
            row["params_difference"],
            f"{row['madds'] / 1e9:.2f}",
            row["paper_madds"],
            row["madds_difference"],
            row["paper_top1"],
        )
        cells.append((row["name"], *("–" if value is None else str(value) for value in values)))
        for part, cost in row["parts"].items() if args.per_stage else ():
            params, madds = f"{cost['params'] / 1e6:.2f}", f"{cost['madds'] / 1e9:.3f}"
            cells.append((f"  {part}", "", params, "", "", madds, "", "", ""))
    columns = ("model", "px", "M", "paper", "%", "G", "paper", "%", "top-1")
    caption = "M parameters, G multiply-adds per image, top-1 in the paper"
    print_table(columns, cells, ("model",), padding=0, show_edge=False, caption=caption)  # 80 columns hold it
    if args.plot:
        print(f"Plot: {args.plot}")
    return 0


def plot_families(families: list[str], path: Path) -> None:
    """Plot the printed rows of these families; an error if the comparison tables have none of them."""
    from saccade._files import write_file
    from saccade.benchmark import plot_trade_offs
    from saccade.benchmark.paper import comparison_rows
    from saccade.reports import to_image

    rows = comparison_rows()
    printed = [family for family in families if any(row["family"] == family for row in rows)]
    if not printed:
        raise UsageError(
            f"expected a family of an ImageNet table to plot, got {', '.join(families)}. Leave --plot out."
        )
    write_file(path, to_image(plot_trade_offs(rows, printed), path.suffix.removeprefix(".").lower()))


def describe(
    pattern: str = "", family: str | None = None, size: int | None = None, max_params: float | None = None, options=None
) -> list[dict]:
    """Return one dict per model: measured and published cost, differences in % (None where not comparable)."""
    import timm

    from saccade import count, list_models
    from saccade.benchmark.paper import REPORTED
    from saccade.cli import check_model

    rows = []
    for name in list_models(pattern):
        model_family = timm.models.model_entrypoint(name).__module__.rpartition(".")[2]
        if family and model_family != family:
            continue
        paper = REPORTED.get(name)
        config = timm.models.get_pretrained_cfg(name)
        expected = config.input_size if config else (3, 224, 224)
        default_size = paper.size if paper else expected[-1]
        shape = (*expected[:-2], size or default_size, size or default_size)
        if options:
            check_model(name, options)
        cost = count(name, shape, **(options or {}))
        if max_params is not None and cost.params > max_params * 1e6:
            continue
        paper_params = paper.params if paper and not options else None
        paper_madds = paper.madds if paper and not options and (size or default_size) == default_size else None
        rows.append(
            {
                "name": name,
                "family": model_family,
                "size": size or default_size,
                "params": cost.params,
                "madds": cost.madds,
                "parts": {part: {"params": c.params, "madds": c.madds} for part, c in cost.parts.items()},
                "paper": paper.paper if paper else None,
                "paper_params": paper_params,
                "paper_madds": paper_madds,
                "paper_top1": paper.top1 if paper else None,
                "params_difference": _difference(cost.params / 1e6, paper_params),
                "madds_difference": _difference(cost.madds / 1e9, paper_madds),
            }
        )
    return sorted(rows, key=lambda row: (row["family"], row["params"]))


def _difference(measured: float, published: str | None) -> float | None:
    return None if published is None else round(100 * (measured / float(published) - 1), 1)
