"""Measure the host time of training steps without a GPU: Python, PyTorch's dispatcher and kernel launches.

    python benchmarks/host_cost.py [calls] [svit_small paca_small …] [--profile] [--rounds 30]

Ops dispatch as on a GPU, but the launch of a kernel returns immediately, so tensors are uninitialised. Models have
full depth and few channels, so that ATen's arithmetic takes no time either: what remains is the host time that a GPU
waits for in an eager step. Times are CPU time of one thread, median of the rounds; a real driver adds its own time
per launch.
"""

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import triton
from timm.models import create_model
from torch import Tensor

import saccade  # noqa: F401 (registers the models)
from saccade.layers import casts
from saccade.layers import linear as linear_layers
from saccade.ops import batch_norm, depthwise, launch, layer_norm, linear, short_attention, super_tokens

# Full depth, few channels.
NARROW = {
    "svit_small": dict(dims=(16, 16, 16, 16), heads=(1, 1, 1, 1), projection=16),
    "paca_small": dict(dims=(16, 16, 16, 16), heads=(1, 1, 1, 1), clusters=(4, 4, 4, 0)),
    "sparseformer_tiny": dict(num_tokens=4, focus_dim=16, cortex_dim=16, heads=1, channels=16, points=4),
    "vt_resnet50": dict(widths=(16, 16, 16), dim=64, token_dim=64, num_heads=4, key_groups=2, value_groups=2),
}
HALF = torch.bfloat16


class Compiled:
    """Substitute for a compiled Triton kernel; its launch does nothing."""

    function, packed_metadata = 0, ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: None

    def run(self, *arguments) -> None:
        return None


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Dispatch as on a GPU, with every kernel already compiled."""
    with ExitStack() as stack:
        for change in (
            patch.object(Tensor, "is_cuda", property(lambda self: True)),
            patch.object(triton.JITFunction, "run", lambda self, *args, **options: Compiled()),
            patch.object(launch, "_current_device", lambda: -1),  # device index of CPU tensors
            patch.object(launch, "_current_stream", lambda device: 0),
            patch.object(casts, "KIND", "cpu"),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            torch.backends.mkldnn.flags(enabled=False),  # oneDNN takes 50 µs to start a product of 1 µs
        ):
            stack.enter_context(change)
        yield


def micros(step: Callable[[], object], rounds: int, repeats: int) -> float:
    """Return microseconds per call."""
    times = []
    for _ in range(rounds):
        before = time.process_time()
        for _ in range(repeats):
            step()
        times.append((time.process_time() - before) / repeats)
    return 1e6 * statistics.median(times)


def with_grad(*tensors: Tensor) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tensors]


def calls() -> dict[str, Callable[[], object]]:
    """Return a forward and backward pass of every training kernel at a tiny size, and of PyTorch for comparison."""
    rows, g = with_grad(torch.randn(8, 64, dtype=HALF))[0], torch.randn(8, 64, dtype=HALF)
    weight, bias = with_grad(torch.ones(64), torch.zeros(64))
    running = torch.zeros(64), torch.ones(64)
    maps, g_maps = with_grad(torch.randn(1, 4, 4, 64, dtype=HALF))[0], torch.randn(1, 4, 4, 64, dtype=HALF)
    features, g_features = maps.detach().permute(0, 3, 1, 2).requires_grad_(), g_maps.permute(0, 3, 1, 2)
    taps, matrix = with_grad(torch.randn(64, 1, 3, 3), torch.randn(64, 64))
    qkv, g_mixed = with_grad(torch.randn(1, 8, 192, dtype=HALF))[0], torch.randn(1, 8, 64, dtype=HALF)

    def backward(y: Tensor, inputs: list[Tensor], gradient: Tensor) -> None:
        torch.autograd.grad(y, inputs, gradient)

    def norm(function: Callable) -> Callable[[], None]:
        return lambda: backward(function(rows, weight, bias, running, 0.1, 1e-5, True), [rows, weight, bias], g)

    def grouped() -> None:
        tokens, association = super_tokens.group(maps, 2, 1e-12)
        backward(super_tokens.spread(tokens, association, 2, 4, 4), [maps], g_maps)

    return {
        "batch norm + ReLU": norm(batch_norm.batch_norm),
        "batch norm + ReLU, PyTorch": norm(batch_norm.batch_norm_twin),
        "layer norm": lambda: backward(layer_norm.layer_norm(maps, weight, bias, 1e-6), [maps, weight, bias], g_maps),
        "depth-wise, GELU before": lambda: backward(
            depthwise.depthwise(features, taps, bias, "pre"), [features, taps, bias], g_features
        ),
        "linear": lambda: backward(linear.linear(rows, matrix, bias, HALF), [rows, matrix, bias], g),
        "short attention": lambda: backward(short_attention.short_attention(qkv, 4), [qkv], g_mixed),
        "super tokens, group and spread": grouped,
    }


def training_step(name: str) -> Callable[[], None]:
    model = create_model(name, num_classes=10, **NARROW[name]).train().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)

    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cpu", HALF):
            logits = model(images)
        logits.float().sum().backward()

    return step


def inference_step(name: str) -> Callable[[], None]:
    model = create_model(name, num_classes=10, **NARROW[name]).eval().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)

    def step() -> None:
        with torch.no_grad(), torch.autocast("cpu", HALF):
            model(images)

    return step


def show(name: str, step: Callable[[], object], rounds: int, repeats: int, profile: bool) -> None:
    for _ in range(3):
        step()
    print(f"{name:40} {micros(step, rounds, repeats):9.1f} µs", flush=True)
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(lambda: [step() for _ in range(10 * repeats)])
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], choices=["calls", *NARROW, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print the most expensive functions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for what in options.what or ["calls", *NARROW]:
        few = (
            what == "sparseformer_tiny"
        )  # at full size it has few rows (49 tokens x 128 images), the other models have many
        with simulated_gpu(), patch.object(linear_layers, "MANY", linear_layers.MANY if few else 0):
            if what == "calls":
                for name, step in calls().items():
                    show(name, step, options.rounds, 100, options.profile)
            else:
                show(f"{what}, training step", training_step(what), options.rounds, 1, options.profile)
                show(f"{what}, inference", inference_step(what), options.rounds, 1, options.profile)


if __name__ == "__main__":
    main()
