"""Time the Triton kernels over tile sizes on a GPU, with their floors.

    python benchmarks/tiles.py [mix mixing sums batch_norm depthwise norms short_norms few_keys grouped tokens]

The floor is the bytes a kernel must move at the copy speed of an H200. The best tile goes into the kernel's `_tile` or
`_gradient_tile`.
"""

import argparse
import itertools
from collections.abc import Callable
from unittest.mock import patch

import torch
import triton

from saccade.kernels import (
    batch_norm,
    depthwise,
    few_keys,
    grouped_linear,
    layer_norm,
    linear,
    looking,
    mixing,
    token_attention,
)  # fmt: skip
from saccade.kernels.launch import forget_plans
from saccade.tokens.regions import sample_and_mix

SPEED = 4.1e12  # bytes per second
MAPS = [(128, 56, 56, 256), (128, 28, 28, 512), (128, 14, 14, 1280)]


def time(step: Callable[[], object]) -> float:
    """Return microseconds per call."""
    return 1e3 * triton.testing.do_bench(step, 3, 15)


def report(name: str, floor_bytes: float, timings: list[tuple[float, tuple]], now: float) -> None:
    best = ", ".join(f"{micros:.0f} {tile}" for micros, tile in sorted(timings)[:3])
    print(f"{name}: floor {1e6 * floor_bytes / SPEED:.0f} µs, now {now:.0f}, best {best}", flush=True)


def compare(name: str, floor_bytes: float, ours: float, theirs: float) -> None:
    print(f"{name}: floor {1e6 * floor_bytes / SPEED:.0f} µs, kernel {ours:.0f}, PyTorch {theirs:.0f}", flush=True)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def try_tiles(module, name: str, make: Callable[..., dict], choices, step: Callable[[], object]):
    """Time `step` with every choice of the module's `_tile` that can be launched."""
    timings = []
    for choice in choices:
        with patch.object(module, name, make(*choice)):
            forget_plans()
            try:
                timings.append((time(step), choice))
            except Exception as problem:  # for example too much shared memory
                print(f"  {choice}: {type(problem).__name__}", flush=True)
    forget_plans()
    return timings


def sweep_depthwise() -> None:
    def make(rows, spans, channels, warps):
        return lambda height, width, count: dict(
            ROWS=min(rows, height), SPANS=spans, CHANNELS=channels, num_warps=warps
        )

    for shape in MAPS:
        x, weight, bias = values(*shape), values(shape[3], 1, 3, 3), values(shape[3])
        choices = [
            (rows, spans, channels, warps)
            for rows, spans, channels, warps in itertools.product((7, 14), (1, 2, 4), (64, 128), (1, 2))
            if 2 <= spans * channels // (32 * warps) <= 4
        ]
        for act in (0, 1, 2):
            step = lambda x=x, weight=weight, bias=bias, act=act: depthwise._forward(x, weight, bias, act, True)  # noqa: E731
            timings = try_tiles(depthwise, "_tile", make, choices, step)
            report(f"depth-wise {shape} act {act}", 4 * x.numel(), timings, time(step))
        step = lambda x=x, weight=weight, bias=bias: depthwise._gradients(x, x, weight, bias, 2, True)  # noqa: E731
        timings = try_tiles(depthwise, "_tile", make, choices, step)
        report(f"  its gradients {shape}, act 2", 14 * x.numel(), timings, time(step))
        choices = [(rows, *choice[1:]) for rows in (8, 16, 28) for choice in choices if choice[0] == 7]
        timings = try_tiles(depthwise, "_weight_tile", make, choices, step)
        report("  with other tiles for the weight", 14 * x.numel(), timings, time(step))


def sweep_norms() -> None:
    for rows, channels in ((401408, 96), (100352, 192), (25088, 320)):
        x, weight, bias = values(rows, channels), values(channels), values(channels)
        wide = triton.next_power_of_2(channels)

        def make(elements, warps, wide=wide):
            return lambda *_: dict(ROWS=max(1, elements // wide), CHANNELS=wide, num_warps=warps)

        choices = list(itertools.product((1024, 2048, 4096), (2, 4, 8)))
        step = lambda x=x, w=weight, b=bias: layer_norm._forward(x, w, b, 1e-6)  # noqa: E731
        timings = try_tiles(layer_norm, "_tile", make, choices, step)
        report(f"norm {rows}x{channels}", 4 * x.numel(), timings, time(step))
        statistics = values(2, rows, dtype=torch.float32)
        step = lambda x=x, w=weight, s=statistics: layer_norm._gradients(x, x, w, s)  # noqa: E731
        timings = try_tiles(layer_norm, "_gradient_tile", make, choices, step)
        report(f"  its gradients {rows}x{channels}", 6 * x.numel(), timings, time(step))


def sweep_short_norms() -> None:
    """Gradients of SparseFormer's lists, with the sum over programs: how many programs, how many rows to each."""
    for rows, channels in ((6272, 256), (6272, 512), (6272, 768), (8192, 1024)):
        x, weight, statistics = values(rows, channels), values(channels), values(2, rows, dtype=torch.float32)
        wide = triton.next_power_of_2(channels)

        def make(elements, warps, programs, wide=wide):
            return lambda *_: dict(ROWS=max(1, elements // wide), CHANNELS=wide, num_warps=warps)

        step = lambda x=x, w=weight, s=statistics: layer_norm._gradients(x, x, w, s)  # noqa: E731
        timings = []
        for programs in (98, 132, 196, 264, 392, 528, 784, 1568):
            choices = [
                (elements, warps, programs)
                for elements, warps in itertools.product((1024, 2048, 4096, 8192), (1, 2, 4, 8))
                if 8 <= elements // (32 * warps) <= 64 and elements >= wide
            ]
            with patch.object(layer_norm, "PROGRAMS", programs):
                timings += try_tiles(layer_norm, "_gradient_tile", make, choices, step)
        forget_plans()
        report(f"gradients of a short list's norm {rows}x{channels}", 6 * x.numel(), timings, time(step))


def sweep_batch_norm() -> None:
    for rows, channels in ((1605632, 64), (401408, 256), (100352, 512), (25088, 1024), (401408, 64)):
        x = values(rows, channels).requires_grad_()
        weight, bias = (values(channels, dtype=torch.float32).requires_grad_() for _ in range(2))
        running = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        g = values(rows, channels)

        def forward_backward(function, x=x, weight=weight, bias=bias, running=running, g=g):
            y = function(x, weight, bias, running, 0.1, 1e-5, True)
            torch.autograd.grad(y, [x, weight, bias], g)

        ours, theirs = (
            time(lambda f=f: forward_backward(f)) for f in (batch_norm.batch_norm, batch_norm.batch_norm_twin)
        )
        compare(f"batch norm + ReLU {rows}x{channels}", 16 * x.numel(), ours, theirs)


def sweep_sums() -> None:
    for rows, channels in ((401408, 256), (100352, 512), (25088, 1280), (6272, 2048), (401408, 64)):
        x = values(rows, channels)
        ours, theirs = time(lambda x=x: linear.column_sum(x)), time(lambda x=x: x.sum(0))
        compare(f"sum of rows {rows}x{channels}", 2 * x.numel(), ours, theirs)


def sweep_mix() -> None:
    x, points = values(128, 56, 56, 96), torch.rand(128, 49, 36, 2, device="cuda")
    both = values(128, 49, 96 * 96 + 36 * 36)
    channels, across = both[..., : 96 * 96].unflatten(2, (96, 96)), both[..., 96 * 96 :].unflatten(2, (36, 36))
    step = lambda: looking.mix(x, points, channels, across, values(96), values(36))  # noqa: E731
    timings = []
    for chunk, warps in itertools.product((16, 32, 64), (2, 4, 8)):
        with patch.object(looking, "MIXED", chunk), patch.object(looking, "WARPS", warps):
            timings.append((time(step), (chunk, warps)))
    report("mix", 2 * both.numel() + 2 * x.numel() + 2 * 128 * 49 * 36 * 96, timings, time(step))


def sweep_mixing() -> None:
    """SparseFormer's mixing: backward alone, and forward and backward against PyTorch."""
    batch, tokens, points, channels = 128, 49, 36, 96
    count, size = batch * tokens, channels * channels + points * points
    features = values(batch, channels, 56, 56).contiguous(memory_format=torch.channels_last).requires_grad_()
    places = torch.rand(batch, tokens, points, 2, device="cuda", requires_grad=True)
    matrices = (0.1 * values(batch, tokens, size)).requires_grad_()
    biases = [values(number, dtype=torch.float32).requires_grad_() for number in (channels, points)]
    g = values(batch, tokens, points, channels)
    read, to_read, to_made = torch.randn_like(g), torch.empty_like(g), torch.empty_like(matrices)
    shared = torch.empty(count, channels + points, device="cuda")

    def step():
        start = mixing._differentiating(count, points, channels, size, False)
        start(g, read, matrices, *biases, to_read, to_made, shared)

    def make(*choice):
        tile = dict(zip(("SLICE", "num_warps", "maxnreg"), choice, strict=True), P=64, C=128)
        return lambda *_: tile

    choices = [(slice_, warps, None) for slice_, warps in itertools.product((32, 64, 128), (4, 8))] + [(64, 4, 168)]
    timings = try_tiles(mixing, "_tile", make, choices, step)
    report("mixing, backward", 4 * matrices.numel() + 6 * g.numel(), timings, time(step))

    def reference(features, places, matrices, *biases):
        channel, point = matrices.split((channels**2, points**2), dim=2)
        parts = channel.unflatten(2, (channels, channels)), point.unflatten(2, (points, points))
        return sample_and_mix(features, places, *parts, *biases)

    def forward_backward(function):
        inputs = [features, places, matrices, *biases]
        torch.autograd.grad(function(*inputs), inputs, g)

    ours, theirs = time(lambda: forward_backward(mixing.look)), time(lambda: forward_backward(reference))
    compare("mixing, forward and backward", 6 * matrices.numel() + 14 * g.numel(), ours, theirs)


def sweep_few_keys() -> None:
    """Number of programs, queries per program, warps and pipeline stages, for the three stages of PaCa-S."""
    for pixels, dim, heads in ((3136, 96, 2), (784, 192, 4), (196, 320, 8)):
        query, key_value, g = values(128, pixels, dim), values(128, 100, 2 * dim), values(128, pixels, dim)
        for back in (False, True):
            wide = 64 if dim // heads > 32 else 32

            def step(query=query, key_value=key_value, g=g, heads=heads, back=back):
                if back:
                    few_keys._ask_gradients(g, query, key_value, heads, 0.2)
                else:
                    few_keys._ask(query, key_value, heads, 0.2)

            def make(queries, warps, stages, wide=wide):
                return lambda *_: dict(Q=queries, K=128, C=wide, num_warps=warps, num_stages=stages)

            tiles = [(128, 8), (64, 4)] if back else [(64, 4), (128, 8)]
            choices = [(*tile, stages) for tile, stages in itertools.product(tiles, (1, 2, 3))]
            now, timings = time(step), []
            for programs in (264, 528, 1056, 2112):
                with patch.object(few_keys, "PROGRAMS", (programs, programs)):
                    tried = try_tiles(few_keys, "_tile", make, choices, step)
                timings += [(micros, (programs, *choice)) for micros, choice in tried]
            report(
                f"few keys {pixels}x{dim}{', backward' if back else ''}", (6 if back else 4) * g.numel(), timings, now
            )


def sweep_grouped() -> None:
    """Grouped linear layers of VT-R50: the kernel, and one dense product with zeros between the groups."""
    for rows, groups, inputs, outputs in ((25088, 16, 64, 128), (25088, 16, 64, 64), (2048, 8, 128, 128)):
        x, weight = values(rows, groups * inputs), values(groups, inputs, outputs)
        g, dense = values(rows, groups * outputs), values(groups * outputs, groups * inputs)
        size = 2 * (x.numel() + g.numel())
        name = f"groups {rows}x{groups}x({inputs}, {outputs})"
        ours = lambda x=x, weight=weight: grouped_linear._multiply(x, weight, None)  # noqa: E731
        compare(name, size, time(ours), time(lambda x=x, dense=dense: x @ dense.t()))
        ours = lambda x=x, weight=weight, g=g: grouped_linear._gradients(g, x, weight)  # noqa: E731
        compare(f"{name}, backward", 2 * size, time(ours), time(lambda x=x, w=dense, g=g: (g @ w, g.t() @ x)))

        def make(rows, warps, stages):
            return lambda wide, to, _: dict(I=wide, O=to, ROWS=rows, num_warps=warps, num_stages=stages)

        ours = lambda x=x, weight=weight: grouped_linear._multiply(x, weight, None)  # noqa: E731
        choices = list(itertools.product((64, 128, 256), (4, 8), (1,)))
        report(name, size, try_tiles(grouped_linear, "_tile", make, choices, ours), time(ours))


def sweep_tokens() -> None:
    """Attention in VT-R50: tokens to pixels, tokens to tokens, pixels to tokens."""
    query, both, few = values(128, 8, 1024), values(128, 196, 2048), values(128, 16, 1024)
    many, pair = values(128, 196, 1024), values(128, 16, 2048)
    to_pixels, to_tokens = token_attention.ask_pixels, token_attention.ask_each_other
    to_pixels_reference, to_tokens_reference = token_attention.ask_pixels_twin, token_attention.ask_each_other_twin
    for name, inputs, kernel, reference, options in (
        ("tokens to pixels", (query, both), to_pixels, to_pixels_reference, (16, 0.125)),
        ("tokens to tokens", (few, few.clone()), to_tokens, to_tokens_reference, (16,)),
        ("pixels to tokens", (many, pair), few_keys.few_keys, few_keys.few_keys_twin, (16,)),
    ):
        inputs = [x.requires_grad_() for x in inputs]
        size = 2 * sum(x.numel() for x in inputs)

        def forward_backward(function, inputs=inputs, options=options):
            y = function(*inputs, *options)
            torch.autograd.grad(y, inputs, y)

        with torch.no_grad():
            forward = [time(lambda f=f, inputs=inputs, n=options: f(*inputs, *n)) for f in (kernel, reference)]
        compare(name, size, *forward)
        compare(
            f"{name}, with backward", 3 * size, *(time(lambda f=f: forward_backward(f)) for f in (kernel, reference))
        )


SWEEPS = {
    "mix": sweep_mix,
    "mixing": sweep_mixing,
    "sums": sweep_sums,
    "batch_norm": sweep_batch_norm,
    "depthwise": sweep_depthwise,
    "norms": sweep_norms,
    "short_norms": sweep_short_norms,
    "few_keys": sweep_few_keys,
    "grouped": sweep_grouped,
    "tokens": sweep_tokens,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=list(SWEEPS), help="default: all")
    for what in parser.parse_args().what or SWEEPS:
        SWEEPS[what]()


if __name__ == "__main__":
    main()
