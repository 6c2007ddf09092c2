"""Options that several commands share."""

import argparse

from saccade.cli import integer, number


def add_inference_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of sliding-window and multi-scale inference."""
    group = parser.add_argument_group("segmentation")
    group.add_argument("--window", type=integer(0), metavar="PX", help="sliding-window size; 0: the full image")
    group.add_argument(
        "--stride", type=integer(0), default=0, metavar="PX", help="stride of the window (default: 2/3 of its size)"
    )
    group.add_argument(
        "--scales",
        type=number(0, exclusive=True),
        nargs="+",
        default=[1.0],
        metavar="X",
        help="average over these image scales",
    )
    return group
