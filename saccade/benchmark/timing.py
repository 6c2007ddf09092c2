"""Interleaved timing: every case runs once per round, so that other load on the machine affects all cases alike."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models import create_model, get_pretrained_cfg
from torch import nn

from saccade.benchmark.cost import count
from saccade.benchmark.machine import Ceiling, PeakMemory, synchronize, timed
from saccade.inference.compile import compile_options
from saccade.inference.optimize import optimize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A model and the conditions it is measured under."""

    model: str
    size: int = 224
    batch: int = 8
    mode: str = "inference"  # or "train": forward, backward, AdamW
    compiled: bool = False
    dtype: str = "float32"  # bfloat16 and float16 by autocast
    channels_last: bool = False
    device: str = "cpu"
    optimized: bool = False  # copy from saccade.optimize: folded, and cast instead of autocast; inference only
    cuda_graph: bool = False  # captured from the optimised copy or a training step, or by torch.compile
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    plain: bool = False  # `torch.compile(model)` and `loss.backward()` without options of ours


@dataclass
class Measurement:
    """The result of a case; seconds are per step, i.e. per batch."""

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
        """Half the interquartile range, relative to the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s: two operations per multiply-add, three times as many in training."""
        passes = 3 if self.case.mode == "train" else 1
        return 2 * self.madds * passes * self.case.batch / self.median / 1e12

    def to_dict(self) -> dict[str, Any]:
        fraction = self.tflops / self.ceiling_tflops if self.ceiling_tflops else None
        return asdict(self.case) | {
            "params": self.params,
            "madds": self.madds,
            "seconds": self.median,
            "rounds": self.seconds,
            "spread": self.spread,
            "images_per_second": self.images_per_second,
            "peak_bytes": self.peak_bytes,
            "tflops": self.tflops,
            "fraction_of_ceiling": fraction,
        }


def measure(
    cases: Sequence[Case],
    rounds: int = 7,
    min_seconds: float = 0.2,
    ceiling: Ceiling | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Measurement]:
    """Build and warm up every case, then time them interleaved for `rounds` rounds of at least `min_seconds` each."""
    steps, results = [], []
    for case in cases:
        progress(f"building {case.model} at {case.size} px")
        step, params = prepare(case)
        step()
        step()
        with PeakMemory(case.device) as peak:
            step()
            synchronize(case.device)
        if case.cuda_graph:  # its memory was allocated at capture
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
    """Yield the seconds per call of each step, one list per round; short steps are repeated for `min_seconds`."""
    once = [timed(step, device, 1) for step, device in zip(steps, devices, strict=True)]
    repeats = [max(1, round(min_seconds / max(seconds, 1e-6))) for seconds in once]
    for _ in range(rounds):
        yield [timed(step, device, n) for step, device, n in zip(steps, devices, repeats, strict=True)]


def prepare(case: Case) -> tuple[Callable[[], Any], int]:
    """Return the step of a case as a function, and the bytes of its parameters."""
    torch.manual_seed(0)
    model = create_model(case.model, **case.options).to(case.device)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    shape = input_shape(case)
    if case.optimized and case.mode == "train":
        raise ValueError("optimised copies are inference-only, got mode train. Use mode inference.")
    if uses_optimized_copy(case):
        model = optimize(model, DTYPES[case.dtype], cuda_graph=case.cuda_graph and not case.compiled)
    images = torch.randn(case.batch, *shape, case.size, case.size, device=case.device)
    if images.ndim == 4:
        images = images.to(memory_format=layout)
    step = train_step if case.mode == "train" else inference_step
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return step(model, images, case), size


def input_shape(case: Case) -> tuple[int, ...]:
    """Return the axes between batch and height: channels, and the frames of a video model."""
    config = get_pretrained_cfg(case.model)
    return tuple(config.input_size[:-2]) if config else (3,)


def uses_optimized_copy(case: Case) -> bool:
    """Whether `saccade.optimize` is applied: on request, or to capture a CUDA graph without torch.compile."""
    return case.optimized or (case.cuda_graph and not case.compiled and case.mode == "inference")


def autocast(case: Case) -> AbstractContextManager[Any]:
    if case.dtype == "float32" or uses_optimized_copy(case):
        return nullcontext()
    # A CUDA graph must contain the weight casts: without it, the autocast cache would skip them at capture.
    return torch.autocast(case.device.partition(":")[0], DTYPES[case.dtype], cache_enabled=not case.cuda_graph)


def compile_for(model: nn.Module, case: Case) -> Callable[..., Any]:
    """Return the model, or the compiled model (with CUDA graphs if `case.cuda_graph`)."""
    if not case.compiled:
        return model
    mode = "reduce-overhead" if case.cuda_graph else None
    return torch.compile(model, mode=mode) if case.plain else torch.compile(model, **compile_options(mode))


def inference_step(model: nn.Module, images: torch.Tensor, case: Case) -> Callable[[], Any]:
    model.eval()
    forward = compile_for(model, case)

    def step() -> torch.Tensor:
        with torch.inference_mode(), autocast(case):
            return forward(images)

    return step


def train_step(model: nn.Module, images: torch.Tensor, case: Case) -> Callable[[], Any]:
    model.train()
    num_classes = int(getattr(model, "num_classes"))  # noqa: B009  (nn.Module types every attribute as a Module)
    forward = compile_for(model, case)
    if case.cuda_graph and not case.compiled:
        with autocast(case):
            forward = cast("Callable[..., Any]", torch.cuda.make_graphed_callables(model, (images,)))  # a union
    fused = case.device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    labels = torch.randint(num_classes, (case.batch,), device=case.device)

    def step() -> None:
        with autocast(case):
            loss = F.cross_entropy(forward(images), labels)
        with nullcontext() if case.plain else torch.autograd.set_multithreading_enabled(False):  # as `saccade train`
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def loader_throughput(batches: Iterable[Any], prepare: Callable[[Any], Any], seconds: float) -> float:
    """Return images/s of loading batches and preparing them, without a model, measured for about `seconds`.

    The first batch, which includes the start of the loader processes, is left out.
    """
    images, started = 0, 0.0
    for batch in batches:
        prepare(batch)
        if not started:
            started = time.perf_counter()
            continue
        images += len(batch.labels)
        if time.perf_counter() - started > seconds:
            break
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return images / (time.perf_counter() - started)
