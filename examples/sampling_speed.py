"""How fast SparseFormer's hot step is: sampling and adaptive mixing, against `grid_sample` and `baddbmm`.

    OMP_NUM_THREADS=1 python examples/sampling_speed.py --batch 8

Both run by turns on the same inputs (Tiny's sizes), and must give the same numbers. The ratio is what to look at;
milliseconds depend on the machine and on who else uses it.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.benchmark import interleave
from saccade.layers.sampling import sample
from saccade.tokens.regions import sample_and_mix


def reference(features, points, channel_weights, point_weights, channel_bias, point_bias) -> Tensor:
    """The same function as PyTorch's library would have it; `grid_sample` wants one type for map and coordinates."""
    grid = 2 * points - 1
    sampled = F.grid_sample(features.to(grid.dtype), grid, align_corners=False).permute(0, 2, 3, 1)
    sampled = sampled.flatten(0, 1).to(features.dtype)
    mixed = F.gelu(torch.baddbmm(channel_bias, sampled, channel_weights.flatten(0, 1)))
    mixed = F.gelu(torch.baddbmm(point_bias[:, None], point_weights.flatten(0, 1), mixed))
    return mixed.unflatten(0, (features.shape[0], -1))


def inputs(batch: int, size: int, dtype: torch.dtype, device: str, train: bool) -> list[Tensor]:
    """Tiny's: 49 tokens, 36 points, 96 channels, a map of a quarter of the image."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(batch, 96, size // 4, size // 4).to(dtype, memory_format=torch.channels_last),
        torch.rand(batch, 49, 36, 2) * 1.1 - 0.05,
        (torch.randn(batch, 49, 96, 96) / 10).to(dtype),
        (torch.randn(batch, 49, 36, 36) / 6).to(dtype),
        torch.randn(96).to(dtype),
        torch.randn(36).to(dtype),
    ]
    return [tensor.to(device).requires_grad_(train) for tensor in tensors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="side of the image, pixels")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for train in (False, True):
        tensors = inputs(options.batch, options.size, getattr(torch, options.dtype), options.device, train)
        difference = (sample_and_mix(*tensors) - reference(*tensors)).abs().max().item()

        def step(function, tensors=tensors, train=train):
            if train:
                return lambda: torch.autograd.grad(function(*tensors).sum(), tensors)
            return lambda: function(*tensors)

        steps = [step(sample_and_mix), step(reference), lambda tensors=tensors: sample(*tensors[:2])]
        rounds = list(interleave(steps, [options.device] * len(steps), options.rounds))
        ours, theirs, sampling = (1e3 * statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = statistics.median(slow / fast for fast, slow, _ in rounds)
        print(
            f"{'forward + backward' if train else 'forward':<18} {ours:7.2f} ms, reference {theirs:7.2f} ms, "
            f"ratio {ratio:.2f}; forward sampling alone {sampling:.2f} ms; largest difference {difference:.1e}"
        )


if __name__ == "__main__":
    main()
