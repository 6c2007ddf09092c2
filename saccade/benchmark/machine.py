"""Describe the machine and measure its peak matrix-product and copy throughput."""

import datetime
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Ceiling(NamedTuple):
    """Peak throughput of this machine."""

    tflops: float  # large matrix product, two operations per multiply-add
    gbytes: float  # large copy, GB/s read plus written


def measure_ceiling(device: str, dtype: torch.dtype = torch.float32) -> Ceiling:
    """Time a large matrix product and a large copy; the best of several runs counts."""
    side = 8192 if device.startswith("cuda") else 2048
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    block = torch.empty(2**30 if device.startswith("cuda") else 2**26, dtype=torch.uint8, device=device)
    product = best_time(lambda: left @ right, device)
    copy = best_time(lambda: block.clone(), device)
    return Ceiling(2 * side**3 / product / 1e12, 2 * block.numel() / copy / 1e9)


def best_time(step: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Return the seconds of the fastest run, after one warm-up run."""
    return min([timed(step, device) for _ in range(repeats + 1)][1:])


def timed(step: Callable[[], Any], device: str, repeats: int = 1) -> float:
    """Return the seconds per call."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def describe_machine(device: str) -> dict[str, Any]:
    """Return what every measurement is published with: device, torch, date, commit."""
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the source tree, or None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class PeakMemory:
    """Measure the peak memory inside the context beyond the memory in use before, in bytes; None where unknown.

    On a GPU from torch's caching allocator; on Linux from VmHWM, which is reset through /proc/self/clear_refs.
    """

    def __init__(self, device: str):
        self.device = device
        self.bytes: int | None = None
        self.before: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            self.before = self._reset_linux()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.before is None:
            return
        if self.device.startswith("cuda"):
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
        else:
            self.bytes = max(0, self._status("VmHWM") - self.before)

    def _reset_linux(self) -> int | None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            return self._status("VmRSS")
        except (OSError, StopIteration):
            return None

    @staticmethod
    def _status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
