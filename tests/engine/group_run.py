"""Run `saccade train`, and print when the process ends whether its process group is still open."""

import atexit
import sys

import torch.distributed as dist

from saccade.cli import main


def report() -> None:
    print(f"group open: {dist.is_initialized()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    atexit.register(report)  # runs after everything that is registered later
    sys.exit(main(["train", *sys.argv[1:]]))
