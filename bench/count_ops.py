"""How many operations one forward pass launches, and who launches them: `python bench/count_ops.py MODEL …`.

Counts every ATen operation that is not a view, on a CPU, under bfloat16 autocast as on a GPU, with the parts a fused
kernel replaces there counted as what they are here. Launch-bound models get faster as this number falls.
"""

import argparse
import traceback
from collections import Counter

import torch
from timm.models import create_model
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.kernels import enabled


class Launches(TorchDispatchMode):
    """Operations that write memory of their own, by the line of code that asked for them."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in ("empty", "detach", "_unsafe_view"):
            ours = [line for line in traceback.extract_stack()[:-1] if "/saccade/" in line.filename]
            self.names[func.overloadpacket.__name__] += 1
            self.lines[f"{ours[-1].filename.rpartition('/saccade/')[2]}:{ours[-1].lineno}" if ours else "?"] += 1
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--optimize", action="store_true", help="the copy of saccade.optimize in bfloat16, no autocast")
    args = parser.parse_args()
    for name in args.models:
        model, images = create_model(name).eval(), torch.randn(1, 3, args.size, args.size)
        if args.optimize:
            model = saccade.optimize(model, torch.bfloat16)
        low = torch.autocast("cpu", torch.bfloat16, enabled=not args.optimize)
        with torch.no_grad(), enabled(False), low, Launches() as seen:
            model(images)
        print(f"{name}: {seen.names.total()} operations")
        for (op, count), (line, number) in zip(
            seen.names.most_common(args.rows), seen.lines.most_common(args.rows), strict=False
        ):
            print(f"  {count:5d} {op:<34}{number:5d} {line}")


if __name__ == "__main__":
    main()
