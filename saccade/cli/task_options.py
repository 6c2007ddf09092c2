"""Options that only some tasks have: given to another task they would change nothing, so that is said."""

import argparse
from typing import Any

Options = dict[str, tuple[tuple[str, ...], Any]]  # name: its tasks, and its value where nobody gave one
SEGMENTATION: Options = {
    "window": (("segmentation",), None),
    "stride": (("segmentation",), 0),
    "scales": (("segmentation",), (1.0,)),
}


def add_inference_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """How a segmenter is asked."""
    group = parser.add_argument_group("segmentation")
    group.add_argument("--window", type=int, metavar="PX", help="slide a window of this side; 0: the whole picture")
    group.add_argument("--stride", type=int, default=0, metavar="PX", help="of the window (default: 2/3 of it)")
    group.add_argument("--scales", type=float, nargs="+", default=[1.0], metavar="X", help="average over these sizes")
    return group


def check_options(args: argparse.Namespace, task: str, options: Options) -> None:
    for name, (tasks, default) in options.items():
        given = getattr(args, name)
        if task not in tasks and (tuple(given) if isinstance(given, list) else given) != default:
            word = "--" + name.replace("_", "-")
            raise ValueError(f"{word} is for {' and '.join(tasks)}; {args.checkpoint} is for {task}: leave it out.")
