"""CPU time and launches of an eager training step, without a GPU: `python benchmarks/host_time.py MODEL …`.

Forward and backward under bfloat16 autocast on CPU tensors, with narrow models and Triton launches that compute nothing
(see count_ops.py): what remains is Python, dispatch and autograd. For models whose widths are `dims` and `heads`.
Compare two commits in interleaved runs: `PYTHONPATH=OTHER_CHECKOUT python benchmarks/host_time.py MODEL`.
"""

import argparse
import os
import statistics
import time

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import timm
import torch
from count_ops import Launches, simulated_gpu

from saccade.ops import linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    linear.MIN_ROWS = 1  # as for large batches
    images = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    for name in args.models:
        model = timm.create_model(name, dims=(32,) * 4, heads=(1,) * 4).train()
        model = model.to(memory_format=torch.channels_last)

        def step(model: torch.nn.Module = model) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(images)
            logits.float().sum().backward()
            model.zero_grad()

        counts, times = Launches(), []
        with simulated_gpu(counts), counts:
            step()
        with simulated_gpu(Launches()), torch.autograd.set_multithreading_enabled(False):
            step()
            for _ in range(args.rounds):
                start = time.process_time()
                for _ in range(args.steps):
                    step()
                times.append((time.process_time() - start) / args.steps * 1e3)
        print(f"{name}: {counts.names.total()} launches, {statistics.median(times):.1f} ms (at least {min(times):.1f})")


if __name__ == "__main__":
    main()
