"""Time by turns: every case runs once a round, so that a busy moment of the machine hits all of them alike."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import create_model
from torch import nn

from saccade.benchmark.cost import count
from saccade.benchmark.machine import Ceiling, PeakMemory, synchronize
from saccade.inference.compile import compile_options
from saccade.inference.optimize import optimize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    model: str
    size: int = 224
    batch: int = 8
    mode: str = "inference"  # or "train": forward, backward, AdamW
    compiled: bool = False
    dtype: str = "float32"  # below float32 by autocast
    channels_last: bool = False
    device: str = "cpu"
    optimized: bool = False  # the copy of saccade.optimize: folded, and cast instead of autocast; inference only
    cuda_graph: bool = False  # launches recorded: of the optimised copy, of a training step, or by the compiler
    options: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass
class Measurement:
    """What was found about a case; seconds are per step of a whole batch."""

    case: Case
    params: int
    madds: int
    seconds: list[float]
    peak_bytes: int | None
    ceiling_tflops: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def images_per_second(self) -> float:
        return self.case.batch / self.median

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    @property
    def tflops(self) -> float:
        """Useful operations a second: two a multiply-add, three times as many in training."""
        passes = 3 if self.case.mode == "train" else 1
        return 2 * self.madds * passes * self.case.batch / self.median / 1e12

    def to_dict(self) -> dict[str, Any]:
        share = self.tflops / self.ceiling_tflops if self.ceiling_tflops else None
        return asdict(self.case) | {
            "params": self.params,
            "madds": self.madds,
            "seconds": self.median,
            "rounds": self.seconds,
            "spread": self.spread,
            "images_per_second": self.images_per_second,
            "peak_bytes": self.peak_bytes,
            "tflops": self.tflops,
            "share_of_ceiling": share,
        }


def measure(
    cases: Sequence[Case],
    rounds: int = 7,
    min_seconds: float = 0.2,
    ceiling: Ceiling | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Measurement]:
    """Build every case, warm it up, then time all of them by turns, `rounds` times, at least `min_seconds` a turn."""
    steps, results = [], []
    for case in cases:
        progress(f"building {case.model} at {case.size} px")
        step, params = prepare(case)
        step()
        step()
        with PeakMemory(case.device) as peak:
            step()
            synchronize(case.device)
        if case.cuda_graph:  # its memory was taken when it was recorded
            peak.bytes = None
        cost = count(case.model, case.size, **case.options)
        steps.append(step)
        peak_bytes = None if peak.bytes is None else peak.bytes + params
        results.append(Measurement(case, cost.params, cost.madds, [], peak_bytes, ceiling.tflops if ceiling else None))
    devices = [case.device for case in cases]
    for round_times in interleave(steps, devices, rounds, min_seconds):
        progress("timing")
        for result, seconds in zip(results, round_times, strict=True):
            result.seconds.append(seconds)
    return results


def interleave(
    steps: Sequence[Callable[[], Any]], devices: Sequence[str], rounds: int, min_seconds: float = 0.2
) -> Iterator[list[float]]:
    """Seconds of one call of each step, a list a round; a short step is repeated to fill its turn."""
    once = [timed(step, device, 1) for step, device in zip(steps, devices, strict=True)]
    repeats = [max(1, round(min_seconds / max(seconds, 1e-6))) for seconds in once]
    for _ in range(rounds):
        yield [timed(step, device, n) for step, device, n in zip(steps, devices, repeats, strict=True)]


def timed(step: Callable[[], Any], device: str, repeats: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def prepare(case: Case) -> tuple[Callable[[], Any], int]:
    """The case as a function to call, and the bytes its parameters take."""
    torch.manual_seed(0)
    model = create_model(case.model, **case.options).to(case.device)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    shape = model.pretrained_cfg["input_size"][:-2]
    if case.optimized and case.mode == "train":
        raise ValueError("an optimised copy cannot be trained: measure it with mode inference.")
    if is_copy(case):
        model = optimize(model, DTYPES[case.dtype], cuda_graph=case.cuda_graph and not case.compiled)
    images = torch.randn(case.batch, *shape, case.size, case.size, device=case.device)
    if images.ndim == 4:
        images = images.to(memory_format=layout)
    step = train_step if case.mode == "train" else inference_step
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return step(model, images, case), size


def is_copy(case: Case) -> bool:
    """Whether the copy of `saccade.optimize` is measured: asked for, or needed to record without a compiler."""
    return case.optimized or (case.cuda_graph and not case.compiled and case.mode == "inference")


def autocast(case: Case):
    if case.dtype == "float32" or is_copy(case):
        return nullcontext()
    # A recording must hold the casts of the weights too: none may come from the cache.
    return torch.autocast(case.device.partition(":")[0], DTYPES[case.dtype], cache_enabled=not case.cuda_graph)


def compiled(model: nn.Module, case: Case) -> nn.Module:
    """The model as the case runs it: as it is, compiled, or compiled with its launches recorded."""
    if not case.compiled:
        return model
    return torch.compile(model, fullgraph=True, **compile_options("reduce-overhead" if case.cuda_graph else None))  # type: ignore


def inference_step(model: nn.Module, images: torch.Tensor, case: Case) -> Callable[[], Any]:
    model.eval()
    forward = compiled(model, case)

    def step() -> torch.Tensor:
        with torch.inference_mode(), autocast(case):
            return forward(images)

    return step


def train_step(model: nn.Module, images: torch.Tensor, case: Case) -> Callable[[], Any]:
    model.train()
    forward = compiled(model, case)
    if case.cuda_graph and not case.compiled:
        with autocast(case):
            forward = torch.cuda.make_graphed_callables(model, (images,))
    fused = case.device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    labels = torch.randint(model.num_classes, (case.batch,), device=case.device)

    def step() -> None:
        with autocast(case):
            loss = F.cross_entropy(forward(images), labels)
        with torch.autograd.set_multithreading_enabled(False):  # as `saccade train` goes back
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
