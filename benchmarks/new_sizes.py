"""What a new image size costs in eager training: `python benchmarks/new_sizes.py [svit_small …]`.

Detection and segmentation train backbones on ever new image sizes. Every model is trained (features only, bfloat16
autocast, channels-last) on a list of random sizes, then on the same list again, and at last on every size twice in a
row: a new size, a size seen before, and one that the step before had. Sides are multiples of 4, as Swin-T needs. Prints
the first step, the medians of the three kinds, ratios, and the kernels that Triton compiled after the first step.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

import timm
import torch

import saccade  # noqa: F401  (registers the models)

MODELS = ("svit_small", "paca_small", "sparseformer_tiny", "vt_resnet50", "swin_tiny_patch4_window7_224")


def count_compilations() -> list[int]:
    """A list of one number, which counts Triton's compilations from now on."""
    counter = [0]
    try:
        from triton import knobs
    except ImportError:
        return counter

    def hook(*args: Any, **kwargs: Any) -> None:
        counter[0] += 1

    knobs.runtime.jit_post_compile_hook = hook
    return counter


def run(name: str, device: str, sizes: list[tuple[int, int]], batch: int) -> dict[str, Any]:
    features_only = "sparseformer" not in name
    options: dict[str, Any] = {"features_only": True} if features_only else {}
    if "swin" in name:
        options |= {"img_size": 800, "strict_img_size": False}
    model = timm.create_model(name, **options).to(device).to(memory_format=torch.channels_last).train()
    compilations = count_compilations()

    def step(height: int, width: int) -> float:
        images = torch.randn(batch, 3, height, width, device=device).contiguous(memory_format=torch.channels_last)
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            outputs = model(images)
        sum(out.float().mean() for out in (outputs if isinstance(outputs, list) else [outputs])).backward()
        model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = step(*sizes[0])
    step(*sizes[0])
    before = compilations[0]
    new = [step(*size) for size in sizes[1:]]
    repeated = [step(*size) for size in sizes[1:]]
    again = [min(step(*size), step(*size)) for size in sizes[1:]]
    ratios = [first_time / second for first_time, second in zip(new, repeated, strict=True)]
    return {
        "model": name,
        "first_s": round(first, 2),
        "new_ms": round(1e3 * statistics.median(new), 1),
        "repeated_ms": round(1e3 * statistics.median(repeated), 1),
        "again_ms": round(1e3 * statistics.median(again), 1),
        "new_to_repeated": round(statistics.median(ratios), 2),
        "worst": round(max(ratios), 2),
        "compiled_first": before,
        "compiled_later": compilations[0] - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--sizes", type=int, default=24)
    parser.add_argument("--low", type=int, default=400)
    parser.add_argument("--high", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rng = random.Random(0)
    sizes = [(rng.randrange(args.low, args.high, 4), rng.randrange(args.low, args.high, 4)) for _ in range(args.sizes)]
    for name in args.models:
        print(json.dumps(run(name, args.device, sizes, args.batch)), flush=True)


if __name__ == "__main__":
    main()
