"""How many operations one forward pass launches, and who launches them: `python bench/count_ops.py MODEL …`.

Counts every ATen operation that is not a view, on a CPU, under bfloat16 autocast as on a GPU. With `--kernels` what a
fused kernel does there is one operation; its answer is not computed. Launch-bound models get faster as it falls.
"""

import argparse
import traceback
from collections import Counter
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from timm.models import create_model
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.kernels import enabled

NOT_LAUNCHED = ("empty", "new_empty", "new_empty_strided", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Operations that write memory of their own, by the line of code that asked for them."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in NOT_LAUNCHED:
            ours = [line for line in traceback.extract_stack()[:-1] if "/saccade/" in line.filename]
            self.names[func.overloadpacket.__name__] += 1
            self.lines[f"{ours[-1].filename.rpartition('/saccade/')[2]}:{ours[-1].lineno}" if ours else "?"] += 1
        return result


def pretend(seen: Launches) -> ExitStack:
    """As on a GPU: every kernel is taken, counts as one launch, and leaves memory of the right shape."""

    def like(shape_of):
        def stub(*args):
            seen.names["fused kernel"] += 1
            return shape_of(*args)

        return stub

    def place(twin, deltas, regions, offsets, grid, *_):
        return regions.new_empty(regions.shape), regions.new_empty(*regions.shape[:2], grid.numel() // 2, 2)

    stubs = {
        "layer_norm.layer_norm": lambda x, *_: x.new_empty(x.shape),
        "looking.place": place,
        "looking.mix": lambda x, points, weights, *_: weights.new_empty(*points.shape[:3], x.shape[3]),
        "norm_relu.norm_relu": lambda x, *_: x,
        "norm_relu.norm_relu_twin": lambda x, *_: x,
    }
    stack = ExitStack()
    for name, shape_of in stubs.items():
        stack.enter_context(patch(f"saccade.kernels.{name}", like(shape_of)))
    for module in ("layers.norm", "layers.sampling", "layers.residual", "tokens.regions"):
        stack.enter_context(patch(f"saccade.{module}.suits", lambda *_: True))
    return stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--optimize", action="store_true", help="the copy of saccade.optimize in bfloat16, no autocast")
    parser.add_argument("--kernels", action="store_true", help="fused kernels as one launch each")
    args = parser.parse_args()
    for name in args.models:
        model, images = create_model(name).eval(), torch.randn(1, 3, args.size, args.size)
        if args.optimize:
            model = saccade.optimize(model, torch.bfloat16)
        low = torch.autocast("cpu", torch.bfloat16, enabled=not args.optimize)
        seen = Launches()
        with torch.no_grad(), enabled(False), low, pretend(seen) if args.kernels else nullcontext(), seen:
            model(images)
        print(f"{name}: {seen.names.total()} operations")
        for (op, count), (line, number) in zip(
            seen.names.most_common(args.rows), seen.lines.most_common(args.rows), strict=False
        ):
            print(f"  {count:5d} {op:<34}{number:5d} {line}")


if __name__ == "__main__":
    main()
