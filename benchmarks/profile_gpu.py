"""Profile models on a GPU, with and without fused kernels: `python benchmarks/profile_gpu.py MODEL …`."""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from saccade.benchmark import Case, measure
from saccade.benchmark.timing import prepare
from saccade.ops import enabled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rows", type=int, default=14)
    parser.add_argument("--mode", default="inference")
    parser.add_argument("--optimize", action="store_true", help="use saccade.optimize")
    parser.add_argument("--compiled", action="store_true", help="use torch.compile")
    args = parser.parse_args()
    for name in args.models:
        case = Case(
            name,
            args.size,
            args.batch,
            args.mode,
            compiled=args.compiled,
            dtype="bfloat16",
            channels_last=True,
            device="cuda",
            optimized=args.optimize,
        )
        for on in (True, False):
            with enabled(on):
                (result,) = measure([case], rounds=5, min_seconds=0.1)
            memory = (result.peak_bytes or 0) / 2**30
            print(
                f"{name} {args.mode} kernels {on}: {result.images_per_second:.0f} images/s, {memory:.2f} GiB",
                flush=True,
            )
        step, _ = prepare(case)
        step()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in events)
        launches = sum(event.count for event in events if event.self_device_time_total > 0)
        print(f"  {total / 1e3:.2f} ms on the GPU, {launches} kernels")
        for event in events[: args.rows]:
            print(f"  {event.self_device_time_total / 1e3:7.3f} ms {event.count:4d}x {event.key[:90]}", flush=True)


if __name__ == "__main__":
    main()
