"""`saccade export`: write a model as ONNX or pt2, and compare the file with PyTorch."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from saccade._errors import UsageError, model_options
from saccade.cli import MAX_SIDE, integer

HELP = "write a model as an ONNX or pt2 file, without custom operators"
EXAMPLE = "saccade export svit_nano.tiny_imagenet --check --out svit_nano.onnx"
FLAGS = ("set", "device", "seed")  # of the shared ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="NAME|CHECKPOINT",
        help="a weights file, a run folder, the name of embedded or released weights, or of a model (randomly "
        "initialised), such as svit_small or svit_small+mask_rcnn",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="the .onnx or .pt2 file to write; Mask R-CNN: also NAME.regions.onnx and NAME.masks.onnx beside it",
    )
    parser.add_argument("--format", choices=("onnx", "pt2"), help="default: by the suffix of --out")
    parser.add_argument(
        "--dynamic", default="batch,size", metavar="AXES", help="batch,size (default), batch, size or none"
    )
    parser.add_argument(
        "--size", type=integer(1, MAX_SIDE), metavar="PX", help="height and width where they are not dynamic"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "int8"),
        default="float32",
        help="dtype of the weights; int8 (ONNX): one scale per output channel, computed in float32",
    )
    parser.add_argument(
        "--with-preprocessing",
        action="store_true",
        help="uint8 images in: resize, crop and normalise in the graph (not for detectors)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the file with PyTorch on photographs; exit code 1 if they differ"
    )


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    import torch

    from saccade.cli import print_json, spinner
    from saccade.inference import FORMATS, export_model

    path = Path(args.out)
    kind = args.format or path.suffix.removeprefix(".")
    if kind not in FORMATS or path.suffix != f".{kind}":
        raise UsageError(f"expected --out to end in .onnx or .pt2 as --format says, got {path.name}.")
    if args.device not in ("auto", "cpu"):
        raise UsageError(f"export runs on the CPU, got --device {args.device}. Remove the flag.")
    dynamic = () if args.dynamic == "none" else tuple(args.dynamic.split(","))
    if args.size and "size" in dynamic:
        raise UsageError("--size fixes height and width. Add --dynamic batch or --dynamic none.")
    model, card, trained = open_named(args)
    dtype = None if args.dtype == "float32" else getattr(torch, args.dtype)
    with spinner(f"exporting {card.name}", args), quiet():
        export = export_model(model, path, kind, dynamic, dtype, args.with_preprocessing, card, args.size)
    if not trained:
        print(f"saccade export: {args.model} is randomly initialised", file=sys.stderr)
    document: dict[str, Any] = {
        "out": str(path),
        "files": [str(file) for file in export.files],
        "format": kind,
        "bytes": export.bytes,
        **{key: export.metadata[key] for key in ("model", "head", "task", "dtype", "input", "outputs")},
    }
    agrees = True
    if args.check:
        agrees = check(args, model, card, export, document)
    if args.json:
        print_json(document)
    else:
        shape = ", ".join(map(str, document["input"]))
        names = ", ".join([str(path), *(file.name for file in export.files[1:])])
        print(f"wrote {names} ({export.bytes / 1e6:.1f} MB): images ({shape}) -> {', '.join(document['outputs'])}")
    return 0 if agrees else 1


def open_named(args: argparse.Namespace) -> tuple[Any, Any, bool]:
    """The model and card of a checkpoint or embedded name; else (False) of a registered model with random weights."""
    from pathlib import Path

    import timm
    import torch

    from saccade import create_model, load, weights
    from saccade.cli import check_source, settings
    from saccade.tasks.load import card_of, describe_model

    options = settings(args.set)
    check_source(args.model, options)
    if (detector := create_named_detector(args, options)) is not None:
        return *detector, False
    has_weights = Path(args.model).exists() or weights.find(args.model) is not None
    if not timm.is_model(args.model) or (has_weights and not options):
        if options:
            raise UsageError("--set builds a model by name; a checkpoint has its own options. Remove the flag.")
        model = load(args.model)
        return model, card_of(model), True
    torch.manual_seed(args.seed)
    model = create_model(args.model, **options)
    card = describe_model(model)
    card = card._replace(name=args.model, kwargs={k: v for k, v in options.items() if k != "num_classes"})
    return model.eval(), card, False


def create_named_detector(args: argparse.Namespace, options: dict[str, Any]) -> tuple[Any, Any] | None:
    """Mask R-CNN or its cascade by name, BACKBONE+HEAD, with random weights; None for anything else."""
    from pathlib import Path

    import timm
    import torch

    from saccade import create_detector, weights
    from saccade.tasks.detection import REGION_HEADS
    from saccade.tasks.load import describe_model
    from saccade.weights.releases import find

    backbone, _, head = args.model.partition("+")
    if head not in REGION_HEADS or not timm.is_model(backbone) or Path(args.model).exists():
        return None
    if not options and (weights.find(args.model) is not None or find(args.model) is not None):
        return None
    with torch.device("meta"), model_options(args.model, options):
        create_detector(backbone, head, **options)
    torch.manual_seed(args.seed)
    model = create_detector(backbone, head, **options)
    kwargs = {key: value for key, value in options.items() if key not in ("num_classes", "backbone_kwargs")}
    card = describe_model(model)._replace(kwargs=options.get("backbone_kwargs", {}), head=head, head_kwargs=kwargs)
    return model.eval(), card


def check(args: argparse.Namespace, model: Any, card: Any, export: Any, document: dict[str, Any]) -> bool:
    """Compare file and model, add the result to the document and print it; whether they agree."""
    from saccade.cli import spinner
    from saccade.inference.export_check import IN_GRAPH_TOLERANCE, TOLERANCE, check_export

    with spinner("comparing", args):
        rows = check_export(export.path, model, card, export.metadata)
    tolerance = max(TOLERANCE[args.dtype], IN_GRAPH_TOLERANCE if args.with_preprocessing else 0.0)
    worst = max(rows, key=lambda row: row.relative)
    agrees = worst.relative <= tolerance
    document["check"] = {
        "agrees": agrees,
        "largest_difference": worst.difference,
        "relative": worst.relative,
        "tolerance": tolerance,
        "versions": versions(),
        "rows": [row._asdict() | {"relative": row.relative} for row in rows],
    }
    if not args.json:
        print_differences(rows, args, document["check"])
    return agrees


def versions() -> dict[str, str]:
    from datetime import date
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "onnx", "onnxruntime")} | {"date": date.today().isoformat()}


def print_differences(rows: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    from saccade.cli import print_table

    columns = ("inputs", "batch", "height", "width", "largest difference", "relative")
    cells = []
    for row in rows:
        sizes = (row.batch, row.height, row.width)
        cells.append((row.inputs, *map(str, sizes), f"{row.difference:.1e}", f"{row.relative:.1e}"))
    caption = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    print_table(columns, cells, ("inputs",), width=100, title=f"{args.model}: file and PyTorch", caption=caption)
    verdict = "agrees" if result["agrees"] else "differs"
    print(
        f"{verdict}: largest difference {result['largest_difference']:.1e}, "
        f"{result['relative']:.1e} of the largest output (tolerance {result['tolerance']:.0e})"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of the exporters metadata their own conversions."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
