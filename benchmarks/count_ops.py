"""How many operations one forward pass launches, and who launches them: `python benchmarks/count_ops.py MODEL …`.

Counts every ATen operation that is not a view, on a CPU, under bfloat16 autocast as on a GPU. With `--kernels` what a
fused kernel does there is one operation; its answer is not computed. Launch-bound models get faster as it falls.
"""

import argparse
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from timm.models import create_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.kernels import cudnn, enabled
from saccade.kernels.launch import Launch
from saccade.layers import casts

NOT_LAUNCHED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view")


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


@contextmanager
def pretended(seen: Launches) -> Iterator[None]:
    """As on a GPU: kernels are taken wherever they suit, count as one launch each, and leave memory as it was."""

    def start(launch: Launch, *tensors: Tensor) -> None:
        seen.names["fused kernel"] += 1

    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "is_cuda", property(lambda tensor: True)))
        stack.enter_context(patch.object(Launch, "__call__", start))
        stack.enter_context(patch.object(cudnn, "THERE", False))  # its calls are no kernels of ours
        stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        stack.enter_context(patch.object(casts, "KIND", "cpu"))
        yield


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
        with torch.no_grad(), low, pretended(seen) if args.kernels else enabled(False), seen:
            model(images)
        print(f"{name}: {seen.names.total()} operations")
        for (op, count), (line, number) in zip(
            seen.names.most_common(args.rows), seen.lines.most_common(args.rows), strict=False
        ):
            print(f"  {count:5d} {op:<34}{number:5d} {line}")


if __name__ == "__main__":
    main()
