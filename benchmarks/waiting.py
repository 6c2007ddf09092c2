"""What an eager step waits for on a GPU: `python benchmarks/waiting.py [sparseformer_tiny svit_small …] [--mode train]`.

An eager step takes the host as long with eight pictures as with a hundred, unless something in it waits for the GPU.
So every model is timed with few pictures and with many, by itself and beside other models that take turns with it; for
each, milliseconds of the host (until the step returns) and of the clock (steps in a row), and which calls of the driver
took the host how long. A step in which PyTorch sees a call that waits is told so (`torch.cuda.set_sync_debug_mode`).
Steps that learn are timed with the way back in a thread of autograd's own too, which is PyTorch's custom on GPUs.
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
    """Milliseconds until a step returns that found the GPU idle; the middle one."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(found)


def clock(step: Callable[[], object], count: int) -> float:
    """Milliseconds of one of so many steps in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def driver_calls(step: Callable[[], object], most: int = 6) -> list[str]:
    """The driver's calls of a step that took the host longest: milliseconds, how often, name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    calls = [event for event in seen.key_averages() if event.key.startswith(("cuda", "cu"))]
    calls = [event for event in calls if event.key != "cudaDeviceSynchronize"]
    calls.sort(key=lambda event: -event.self_cpu_time_total)
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / 1e3
    lines = [f"{event.self_cpu_time_total / 1e3:8.2f} ms {event.count:5d}x {event.key}" for event in calls[:most]]
    return [f"{busy:8.2f} ms on the GPU", *lines]


def waits(step: Callable[[], object]) -> list[str]:
    """What PyTorch says of calls that wait for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in seen if "synchroniz" in str(warning.message)]
    return sorted({f"{warning.filename}:{warning.lineno}" for warning in found})


def report(name: str, step: Callable[[], object], learns: bool) -> None:
    for _ in range(4):
        step()
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    print(f"{name}: host {host(step):.1f} ms, clock {clock(step, 10):.1f} ms", flush=True)
    if learns:
        with patch.object(torch.autograd, "set_multithreading_enabled", lambda on: nullcontext()):
            print(f"  back in another thread: host {host(step):.1f} ms, clock {clock(step, 10):.1f} ms", flush=True)
    made = torch.cuda.memory_stats()["num_device_alloc"] - allocated
    if made:
        print(f"  {made} pieces of memory were asked of the driver meanwhile")


def explain(name: str, step: Callable[[], object]) -> None:
    """Where the host's time goes. Comes last: a profiler may slow down what its process does afterwards."""
    print(f"{name}:", *driver_calls(step), *(f"waits in {place}" for place in waits(step)), sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--mode", default="train", choices=["train", "inference"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 128])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU; `saccade bench` measures on a CPU.")
    learns = args.mode == "train"
    for model in args.models:
        for batch in args.batches:
            step, _ = prepare(case(model, args.mode, args.size, batch))
            report(f"{model} by itself, {batch} pictures", step, learns)
            del step
            torch.cuda.empty_cache()
    steps = {model: prepare(case(model, args.mode, args.size, args.batches[-1]))[0] for model in args.models}
    for model, step in steps.items():
        for other in steps.values():
            other()
        report(f"{model} among {len(steps)}, {args.batches[-1]} pictures", step, learns)
        print(f"  of two steps in a row {clock(step, 2):.1f} ms, after the others", flush=True)
    for model, step in steps.items():
        explain(model, step)


if __name__ == "__main__":
    main()
