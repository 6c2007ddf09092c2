"""`saccade models`: what there is, what it costs, and what the papers say it costs."""

import argparse

HELP = "list the models: parameters and multiply-adds, beside the papers' figures"
EXAMPLE = "saccade models 'svit*' --size 384"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="", help="shell wildcard, such as 'svit*'")
    parser.add_argument("--size", type=int, help="pixels along the side of the image (default: the paper's)")
    parser.add_argument("--family", help="only the models of one family: svit, paca, sparseformer, vt")
    parser.add_argument("--max-params", type=float, metavar="M", help="only models of at most M million parameters")


def run(args: argparse.Namespace) -> int:
    from saccade.cli import print_json, settings

    rows = describe(args.pattern, args.family, args.size, args.max_params, settings(args.set))
    if not rows:
        raise ValueError(f"no model matches {args.pattern or args.family!r}; `saccade models` lists them all.")
    if args.json:
        print_json(rows)
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="M parameters, G multiply-adds of one image, top-1 of the paper",
    )
    table.add_column("model", no_wrap=True)
    for column in ("px", "M", "paper", "%", "G", "paper", "%", "top-1"):
        table.add_column(column, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        if i and row["family"] != rows[i - 1]["family"]:
            table.add_section()
        figures = (
            row["size"],
            f"{row['params'] / 1e6:.2f}",
            row["paper_params"],
            row["params_difference"],
            f"{row['madds'] / 1e9:.2f}",
            row["paper_madds"],
            row["madds_difference"],
            row["paper_top1"],
        )
        table.add_row(row["name"], *("–" if figure is None else str(figure) for figure in figures))
    Console().print(table)
    return 0


def describe(
    pattern: str = "", family: str | None = None, size: int | None = None, max_params: float | None = None, options=None
) -> list[dict]:
    """One dict a model: measured and reported cost; differences in %, None where nothing is comparable."""
    import timm

    from saccade import list_models
    from saccade.benchmark import count
    from saccade.models.paper import REPORTED

    rows = []
    for name in list_models(pattern):
        belongs = timm.models.model_entrypoint(name).__module__.rpartition(".")[2]
        if family and belongs != family:
            continue
        paper = REPORTED.get(name)
        config = timm.models.get_pretrained_cfg(name)
        expected = config.input_size if config else (3, 224, 224)
        own_size = paper.size if paper else expected[-1]
        shape = (*expected[:-2], size or own_size, size or own_size)
        cost = count(name, shape, **(options or {}))
        if max_params and cost.params > max_params * 1e6:
            continue
        printed = paper.params if paper and not options else None
        printed_madds = paper.madds if paper and not options and (size or own_size) == own_size else None
        rows.append(
            {
                "name": name,
                "family": belongs,
                "size": size or own_size,
                "params": cost.params,
                "madds": cost.madds,
                "paper": paper.paper if paper else None,
                "paper_params": printed,
                "paper_madds": printed_madds,
                "paper_top1": paper.top1 if paper else None,
                "params_difference": _difference(cost.params / 1e6, printed),
                "madds_difference": _difference(cost.madds / 1e9, printed_madds),
            }
        )
    return sorted(rows, key=lambda row: (row["family"], row["params"]))


def _difference(ours: float, printed: str | None) -> float | None:
    return None if printed is None else round(100 * (ours / float(printed) - 1), 1)
