"""Count the launches of one forward pass, by operation and source line: `python benchmarks/count_ops.py MODEL …`.

Counts ATen operations that are not views, on a CPU under bfloat16 autocast. With `--kernels` the operations of
`saccade.ops` run fused and every Triton launch counts as one operation; its output is not computed.
Fewer launches make launch-bound models faster.
"""

import argparse
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from timm.models import create_model
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade import ops
from saccade.ops._launch import Kernel

NOT_LAUNCHED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Count operations that write memory, by name and source line."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fused = func.namespace == "saccade"  # its kernels are counted instead
        if not func.is_view and not fused and func.overloadpacket.__name__ not in NOT_LAUNCHED:
            own_lines = [line for line in traceback.extract_stack()[:-1] if "/saccade/" in line.filename]
            self.names[func.overloadpacket.__name__] += 1
            self.lines[
                f"{own_lines[-1].filename.rpartition('/saccade/')[2]}:{own_lines[-1].lineno}" if own_lines else "?"
            ] += 1
        return result


@contextmanager
def simulated_gpu(counts: Launches) -> Iterator[None]:
    """Dispatch to Triton on CPU tensors; each launch is counted and computes nothing. cuDNN is not simulated."""

    def launch(kernel: Kernel, *arguments: Any) -> None:
        counts.names[kernel.function.fn.__name__] += 1

    with ops.interpreted(), patch.object(Kernel, "__call__", launch):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--optimize", action="store_true", help="use saccade.optimize in bfloat16 instead of autocast")
    parser.add_argument("--kernels", action="store_true", help="run fused kernels, one launch each")
    args = parser.parse_args()
    for name in args.models:
        model, images = create_model(name).eval(), torch.randn(1, 3, args.size, args.size)
        if args.optimize:
            model = saccade.optimize(model, torch.bfloat16)
        low = torch.autocast("cpu", torch.bfloat16, enabled=not args.optimize)
        counts = Launches()
        with torch.no_grad(), low, simulated_gpu(counts) if args.kernels else ops.enabled(False), counts:
            model(images)
        print(f"{name}: {counts.names.total()} operations")
        for (op, count), (line, number) in zip(
            counts.names.most_common(args.rows), counts.lines.most_common(args.rows), strict=False
        ):
            print(f"  {count:5d} {op:<34}{number:5d} {line}")


if __name__ == "__main__":
    main()
