"""Find what an eager step waits for on a GPU: `python benchmarks/waiting.py [sparseformer_tiny …] [--mode train]`.

The host time of an eager step does not depend on the batch size unless something in it waits for the GPU. Every model
is timed with small and large batches, alone and interleaved with other models: host time (until the step returns),
wall time (consecutive steps), and the longest driver calls. Synchronizing calls are listed
(`torch.cuda.set_sync_debug_mode`). Training steps are also timed with backward on autograd's worker thread, PyTorch's
default on GPUs.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import saccade  # noqa: F401  (registers the models)
from saccade.benchmark import Case
from saccade.benchmark.timing import prepare

MODELS = ("sparseformer_tiny", "svit_small", "paca_small", "vt_resnet50", "resnet50")


def case(model: str, mode: str, size: int, batch: int) -> Case:
    return Case(model, size, batch, mode, dtype="bfloat16", channels_last=True, device="cuda")


def host(step: Callable[[], object], rounds: int = 10) -> float:
    """Return the median milliseconds until a step returns, starting with an idle GPU."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(times)


def clock(step: Callable[[], object], count: int) -> float:
    """Return milliseconds per step of `count` consecutive steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def driver_calls(step: Callable[[], object], limit: int = 6) -> list[str]:
    """Return the driver calls with the longest host time: milliseconds, count, name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    calls = [event for event in profiler.key_averages() if event.key.startswith(("cuda", "cu"))]
    calls = [event for event in calls if event.key != "cudaDeviceSynchronize"]
    calls.sort(key=lambda event: -event.self_cpu_time_total)
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    lines = [f"{event.self_cpu_time_total / 1e3:8.2f} ms {event.count:5d}x {event.key}" for event in calls[:limit]]
    return [f"{busy:8.2f} ms on the GPU", *lines]


def waits(step: Callable[[], object]) -> list[str]:
    """Return the source lines of calls that synchronize with the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronizing = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return sorted({f"{warning.filename}:{warning.lineno}" for warning in synchronizing})


def report(name: str, step: Callable[[], object], trains: bool) -> None:
    for _ in range(4):
        step()
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    print(f"{name}: host {host(step):.1f} ms, clock {clock(step, 10):.1f} ms", flush=True)
    if trains:
        with patch.object(torch.autograd, "set_multithreading_enabled", lambda on: nullcontext()):
            print(
                f"  backward on the worker thread: host {host(step):.1f} ms, clock {clock(step, 10):.1f} ms", flush=True
            )
    allocations = torch.cuda.memory_stats()["num_device_alloc"] - allocated
    if allocations:
        print(f"  {allocations} allocations by the driver meanwhile")


def explain(name: str, step: Callable[[], object]) -> None:
    """Print the longest driver calls. Called last: a profiler may slow down the rest of its process."""
    print(f"{name}:", *driver_calls(step), *(f"waits in {place}" for place in waits(step)), sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--mode", default="train", choices=["train", "inference"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 128])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU. `saccade bench` measures on a CPU.")
    trains = args.mode == "train"
    for model in args.models:
        for batch in args.batches:
            step, _ = prepare(case(model, args.mode, args.size, batch))
            report(f"{model} alone, {batch} images", step, trains)
            del step
            torch.cuda.empty_cache()
    steps = {model: prepare(case(model, args.mode, args.size, args.batches[-1]))[0] for model in args.models}
    for model, step in steps.items():
        for other in steps.values():
            other()
        report(f"{model} interleaved with {len(steps) - 1}, {args.batches[-1]} images", step, trains)
        print(f"  two consecutive steps {clock(step, 2):.1f} ms each, after the others", flush=True)
    for model, step in steps.items():
        explain(model, step)


if __name__ == "__main__":
    main()
