"""Which tile suits which kernel: times the kernels over tiles on a GPU, beside the floor.

    python benchmarks/tiles.py [mix mixing sums batch_norm depthwise few_keys grouped tokens]

The floor is the bytes a kernel must move over the copy speed of an H200. What wins goes into the kernel's `_tile` or
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
    linear,
    looking,
    mixing,
    token_attention,
)  # fmt: skip
from saccade.kernels.launch import forget_plans
from saccade.tokens.regions import sample_and_mix

SPEED = 4.1e12  # bytes a second
MAPS = [(128, 56, 56, 256), (128, 28, 28, 512), (128, 14, 14, 1280)]


def time(step: Callable[[], object]) -> float:
    """Microseconds of one call."""
    return 1e3 * triton.testing.do_bench(step, 3, 15)


def report(name: str, floor_bytes: float, found: list[tuple[float, tuple]], now: float) -> None:
    best = ", ".join(f"{micros:.0f} {tile}" for micros, tile in sorted(found)[:3])
    print(f"{name}: floor {1e6 * floor_bytes / SPEED:.0f} µs, now {now:.0f}, best {best}", flush=True)


def compare(name: str, floor_bytes: float, ours: float, theirs: float) -> None:
    print(f"{name}: floor {1e6 * floor_bytes / SPEED:.0f} µs, ours {ours:.0f}, library {theirs:.0f}", flush=True)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def try_tiles(module, name: str, make: Callable[..., dict], choices, step: Callable[[], object]):
    """Time `step` under every choice of the module's `_tile`; those that cannot be launched are left out."""
    found = []
    for choice in choices:
        with patch.object(module, name, make(*choice)):
            forget_plans()
            try:
                found.append((time(step), choice))
            except Exception as problem:  # too much shared memory, say
                print(f"  {choice}: {type(problem).__name__}", flush=True)
    forget_plans()
    return found


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
            found = try_tiles(depthwise, "_tile", make, choices, step)
            report(f"depth-wise {shape} act {act}", 4 * x.numel(), found, time(step))
        step = lambda x=x, weight=weight, bias=bias: depthwise._gradients(x, x, weight, bias, 2, True)  # noqa: E731
        found = try_tiles(depthwise, "_tile", make, choices, step)
        report(f"  its gradients {shape}, act 2", 14 * x.numel(), found, time(step))
        choices = [(rows, *choice[1:]) for rows in (8, 16, 28) for choice in choices if choice[0] == 7]
        found = try_tiles(depthwise, "_weight_tile", make, choices, step)
        report("  with other tiles for the weight", 14 * x.numel(), found, time(step))


def sweep_batch_norm() -> None:
    for rows, channels in ((1605632, 64), (401408, 256), (100352, 512), (25088, 1024), (401408, 64)):
        x = values(rows, channels).requires_grad_()
        weight, bias = (values(channels, dtype=torch.float32).requires_grad_() for _ in range(2))
        running = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        g = values(rows, channels)

        def learn(function, x=x, weight=weight, bias=bias, running=running, g=g):
            y = function(x, weight, bias, running, 0.1, 1e-5, True)
            torch.autograd.grad(y, [x, weight, bias], g)

        ours, theirs = (time(lambda f=f: learn(f)) for f in (batch_norm.batch_norm, batch_norm.batch_norm_twin))
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
    found = []
    for chunk, warps in itertools.product((16, 32, 64), (2, 4, 8)):
        with patch.object(looking, "MIXED", chunk), patch.object(looking, "WARPS", warps):
            found.append((time(step), (chunk, warps)))
    report("mix", 2 * both.numel() + 2 * x.numel() + 2 * 128 * 49 * 36 * 96, found, time(step))


def sweep_mixing() -> None:
    """The way back of SparseFormer's mixing alone, and there and back against the library."""
    batch, tokens, points, channels = 128, 49, 36, 96
    count, size = batch * tokens, channels * channels + points * points
    features = values(batch, channels, 56, 56).contiguous(memory_format=torch.channels_last).requires_grad_()
    places = torch.rand(batch, tokens, points, 2, device="cuda", requires_grad=True)
    made = (0.1 * values(batch, tokens, size)).requires_grad_()
    biases = [values(number, dtype=torch.float32).requires_grad_() for number in (channels, points)]
    g = values(batch, tokens, points, channels)
    read, to_read, to_made = torch.randn_like(g), torch.empty_like(g), torch.empty_like(made)
    shared = torch.empty(count, channels + points, device="cuda")

    def step():
        start = mixing._differentiating(count, points, channels, size, False)
        start(g, read, made, *biases, to_read, to_made, shared)

    def make(*choice):
        tile = dict(zip(("SLICE", "num_warps", "maxnreg"), choice, strict=True), P=64, C=128)
        return lambda *_: tile

    choices = [(slice_, warps, None) for slice_, warps in itertools.product((32, 64, 128), (4, 8))] + [(64, 4, 168)]
    found = try_tiles(mixing, "_tile", make, choices, step)
    report("mixing, its way back", 4 * made.numel() + 6 * g.numel(), found, time(step))

    def twin(features, places, made, *biases):
        channel, point = made.split((channels**2, points**2), dim=2)
        matrices = channel.unflatten(2, (channels, channels)), point.unflatten(2, (points, points))
        return sample_and_mix(features, places, *matrices, *biases)

    def learn(function):
        inputs = [features, places, made, *biases]
        torch.autograd.grad(function(*inputs), inputs, g)

    ours, theirs = time(lambda: learn(mixing.look)), time(lambda: learn(twin))
    compare("mixing, there and back", 6 * made.numel() + 14 * g.numel(), ours, theirs)


def sweep_few_keys() -> None:
    """Programs, queries at once, threads and loads ahead, of PaCa-S's three stages."""
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
            now, found = time(step), []
            for programs in (264, 528, 1056, 2112):
                with patch.object(few_keys, "PROGRAMS", (programs, programs)):
                    tried = try_tiles(few_keys, "_tile", make, choices, step)
                found += [(micros, (programs, *choice)) for micros, choice in tried]
            report(f"few keys {pixels}x{dim}{', back' if back else ''}", (6 if back else 4) * g.numel(), found, now)


def sweep_grouped() -> None:
    """VT-R50's groups: the kernel, and one product with zeros between the groups."""
    for rows, groups, inputs, outputs in ((25088, 16, 64, 128), (25088, 16, 64, 64), (2048, 8, 128, 128)):
        x, weight = values(rows, groups * inputs), values(groups, inputs, outputs)
        g, whole = values(rows, groups * outputs), values(groups * outputs, groups * inputs)
        size = 2 * (x.numel() + g.numel())
        name = f"groups {rows}x{groups}x({inputs}, {outputs})"
        ours = lambda x=x, weight=weight: grouped_linear._multiply(x, weight, None)  # noqa: E731
        compare(name, size, time(ours), time(lambda x=x, whole=whole: x @ whole.t()))
        ours = lambda x=x, weight=weight, g=g: grouped_linear._gradients(g, x, weight)  # noqa: E731
        compare(f"{name}, back", 2 * size, time(ours), time(lambda x=x, w=whole, g=g: (g @ w, g.t() @ x)))

        def make(rows, warps, stages):
            return lambda wide, to, _: dict(I=wide, O=to, ROWS=rows, num_warps=warps, num_stages=stages)

        ours = lambda x=x, weight=weight: grouped_linear._multiply(x, weight, None)  # noqa: E731
        choices = list(itertools.product((64, 128, 256), (4, 8), (1,)))
        report(name, size, try_tiles(grouped_linear, "_tile", make, choices, ours), time(ours))


def sweep_tokens() -> None:
    """VT-R50's attention: tokens that ask pixels or one another, and pixels that ask tokens."""
    query, both, few = values(128, 8, 1024), values(128, 196, 2048), values(128, 16, 1024)
    many, pair = values(128, 196, 1024), values(128, 16, 2048)
    ask, each = token_attention.ask_pixels, token_attention.ask_each_other
    ask_twin, each_twin = token_attention.ask_pixels_twin, token_attention.ask_each_other_twin
    for name, inputs, ours, twin, numbers in (
        ("tokens ask pixels", (query, both), ask, ask_twin, (16, 0.125)),
        ("tokens ask one another", (few, few.clone()), each, each_twin, (16,)),
        ("pixels ask tokens", (many, pair), few_keys.few_keys, few_keys.few_keys_twin, (16,)),
    ):
        inputs = [x.requires_grad_() for x in inputs]
        size = 2 * sum(x.numel() for x in inputs)

        def learn(function, inputs=inputs, numbers=numbers):
            y = function(*inputs, *numbers)
            torch.autograd.grad(y, inputs, y)

        with torch.no_grad():
            there = [time(lambda f=f, inputs=inputs, n=numbers: f(*inputs, *n)) for f in (ours, twin)]
        compare(name, size, *there)
        compare(f"{name}, and back", 3 * size, *(time(lambda f=f: learn(f)) for f in (ours, twin)))


SWEEPS = {
    "mix": sweep_mix,
    "mixing": sweep_mixing,
    "sums": sweep_sums,
    "batch_norm": sweep_batch_norm,
    "depthwise": sweep_depthwise,
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
