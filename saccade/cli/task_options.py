"""Options that several commands share."""

import argparse


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
