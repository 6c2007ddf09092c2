"""Compare SparseFormer's sampling and adaptive mixing with `grid_sample` and `baddbmm`, interleaved.

    python benchmarks/sampling.py --batch 8 --threads 1

Same inputs (the sizes of SparseFormer-T), same outputs; compare the ratios. Then profiles the parts of a model.
"""

import argparse
import statistics
import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.benchmark import describe_machine, interleave
from saccade.ops.roi_sampling import sample, sample_and_mix


def reference(features: Tensor, points: Tensor, weights: Tensor, channel_bias: Tensor, point_bias: Tensor) -> Tensor:
    """The same function with ATen ops; `grid_sample` needs one dtype for map and coordinates."""
    channels, num_points = len(channel_bias), len(point_bias)
    channel_weights, point_weights = weights.flatten(0, 1).split((channels**2, num_points**2), dim=1)
    grid = 2 * points - 1
    sampled = F.grid_sample(features.to(grid.dtype), grid, align_corners=False).permute(0, 2, 3, 1)
    sampled = sampled.flatten(0, 1).to(features.dtype)
    mixed = F.gelu(torch.baddbmm(channel_bias, sampled, channel_weights.unflatten(1, (channels, channels))))
    mixed = F.gelu(torch.baddbmm(point_bias[:, None], point_weights.unflatten(1, (num_points, num_points)), mixed))
    return mixed.unflatten(0, (features.shape[0], -1))


def inputs(batch: int, size: int, dtype: torch.dtype, device: str, train: bool) -> list[Tensor]:
    """Return inputs of SparseFormer-T: 49 tokens, 36 points, 96 channels, a map at stride 4."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(batch, 96, size // 4, size // 4).to(dtype, memory_format=torch.channels_last),
        torch.rand(batch, 49, 36, 2) * 1.1 - 0.05,
        torch.cat([torch.randn(batch, 49, 96 * 96) / 10, torch.randn(batch, 49, 36 * 36) / 6], dim=2).to(dtype),
        torch.randn(96).to(dtype),
        torch.randn(36).to(dtype),
    ]
    return [tensor.to(device).requires_grad_(train) for tensor in tensors]


def compare(args: argparse.Namespace, train: bool) -> None:
    tensors = inputs(args.batch, args.size, getattr(torch, args.dtype), args.device, train)
    difference = (sample_and_mix(*tensors) - reference(*tensors)).abs().max().item()

    def step(function):
        function = torch.compile(function, fullgraph=True) if args.compiled else function
        if train:
            return lambda: torch.autograd.grad(function(*tensors).sum(), tensors)
        return lambda: function(*tensors)

    steps = [step(sample_and_mix), step(reference), lambda: sample(*tensors[:2])]
    rounds = list(interleave(steps, [args.device] * len(steps), args.rounds))
    fused, aten, sampling = (1e3 * statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(slow / fast for fast, slow, _ in rounds)
    print(
        f"{'forward and backward' if train else 'forward'}: {fused:.2f} ms against {aten:.2f} ms, {ratio:.2f} times "
        f"faster; forward sampling alone {sampling:.2f} ms; largest difference {difference:.0e}"
    )


@torch.no_grad()
def profile_parts(args: argparse.Namespace, rounds: int = 5) -> None:
    """Print the fraction of each part in the forward pass; a part includes its children."""
    model: Any = saccade.create_model(args.model).to(args.device).eval()
    images = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    spent: Counter[str] = Counter()

    def watch(label: str, module: nn.Module) -> None:
        started: list[float] = []
        module.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))
        module.register_forward_hook(lambda *_: spent.update({label: time.perf_counter() - started.pop()}))

    watch("all", model)
    watch("early convolution", model.stem)
    for transformer in (model.focus, model.cortex):
        for block in transformer.blocks:
            watch("attention", block.attn)
            watch("feed-forward", block.mlp)
            if block.tokenizer is not None:
                watch("sampling", block.tokenizer)
                watch("sampling: points", block.tokenizer.placer)
                watch("sampling: decode", block.tokenizer.decoder)
                watch("sampling: decode: generator", block.tokenizer.decoder.to_weights)
                watch("sampling: decode: projection", block.tokenizer.decoder.proj)
    model(images)
    spent.clear()
    for _ in range(rounds):
        model(images)
    print(f"{args.model}, {args.batch} images of {args.size} px")
    for label, seconds in spent.items():
        print(f"  {label:<26}{seconds / spent['all']:6.1%}{1e3 * seconds / rounds:9.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sparseformer_tiny", help="model of the second part")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="image size in pixels")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true", help="compile both functions")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(describe_machine(args.device))
    for train in (False, True):
        compare(args, train)
    if args.device == "cpu":  # on a GPU the hooks would time launches
        profile_parts(args)


if __name__ == "__main__":
    main()
