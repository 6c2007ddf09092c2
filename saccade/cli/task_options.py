"""Options that apply to some tasks only; passing one to another task is an error."""

import argparse
from typing import Any

Options = dict[str, tuple[tuple[str, ...], Any]]  # option name -> tasks, default
SEGMENTATION: Options = {
    "window": (("segmentation",), None),
    "stride": (("segmentation",), 0),
    "scales": (("segmentation",), (1.0,)),
}


def add_inference_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of sliding-window and multi-scale inference."""
    group = parser.add_argument_group("segmentation")
    group.add_argument("--window", type=int, metavar="PX", help="sliding-window size; 0: the full image")
    group.add_argument(
        "--stride", type=int, default=0, metavar="PX", help="stride of the window (default: 2/3 of its size)"
    )
    group.add_argument(
        "--scales", type=float, nargs="+", default=[1.0], metavar="X", help="average over these image scales"
    )
    return group


def check_options(args: argparse.Namespace, task: str, options: Options) -> None:
    """Raise ValueError for an option that was set but does not apply to the task."""
    for name, (tasks, default) in options.items():
        given = getattr(args, name)
        if task not in tasks and (tuple(given) if isinstance(given, list) else given) != default:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} applies to {' and '.join(tasks)}, but {args.checkpoint} is for {task}. Remove the flag."
            )
