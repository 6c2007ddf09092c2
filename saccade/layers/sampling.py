"""Reading a map between its pixels: linear interpolation at points, on images (x, y) and in videos (x, y, t).

One idea for any number of axes. Along one axis, a point at distance d from a pixel's centre takes a share of
max(0, 1 - d) from it, so at most two neighbouring pixels count; on several axes shares multiply. Sampling is
then a weighted sum of 2, 4 or 8 rows of the list of pixels. Outside the map is zero (SF-04), pixel i of n has its
centre at (i + 0.5) / n (SF-10): what `grid_sample(…, align_corners=False)` computes, but on channels-last memory, in
the map's own precision with coordinates in theirs, and several times faster when compiled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import allowed, looking, suits


def sample(features: Tensor, points: Tensor) -> Tensor:
    """features (B, C, H, W) at points (B, M, P, 2), x y in units of the map -> (B, M, P, C).

    Or features (B, C, T, H, W) at points (B, M, P, 3), x y t. The result has the type of the features.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if points.shape[-1] == 2 and points.dtype == torch.float32 and suits(features, points) and any_order():
            return looking.sample(features.permute(0, 2, 3, 1), points)
    first, steps, share = neighbours(points, features.shape[2:])
    pixels = features.flatten(2).transpose(1, 2).flatten(0, 1)  # (B N, C), a view when channels-last
    return weighted_rows(pixels, first, steps, share)


def any_order() -> bool:
    """Whether the kernel may be taken: its gradients add up in any order, so not where runs must repeat exactly."""
    exact = torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled()
    return allowed("sample") and not exact


def neighbours(points: Tensor, size: list[int]) -> tuple[Tensor, list[int], Tensor]:
    """The K pixels around each point, in the list of all pixels of all images.

    points (B, M, P, A) in the order x, y, t; size of the map in the order of memory, (T,) H, W -> place of the first
    neighbour (B, M, P), steps from it to each neighbour (K), share of each neighbour (K, B, M, P).
    """
    first = torch.arange(points.shape[0], device=points.device).view(-1, 1, 1)  # the slowest axis is the image
    steps, share = [0], torch.ones(1, 1, 1, 1, dtype=points.dtype, device=points.device)
    for axis, length in enumerate(size):
        at = points[..., len(size) - 1 - axis] * length - 0.5  # pixel i is centred at i
        low = at.long().clamp(0, length - 2 if length > 1 else 0)  # of the two neighbours, also far outside
        away = at - low
        sides = [away, away - 1] if length > 1 else [away]
        part = F.relu(1 - torch.stack(sides).abs())  # (2, B, M, P)
        share = (share.unsqueeze(1) * part).flatten(0, 1)
        first = first * length + low
        corners: list[int] = []
        for step in steps:
            corners += [length * step + side for side in range(len(sides))]
        steps = corners
    return first, steps, share


def weighted_rows(rows: Tensor, first: Tensor, steps: list[int], share: Tensor) -> Tensor:
    """rows (N, C), first (B, M, P), K steps, share (K, B, M, P) -> sums of K rows each, (B, M, P, C)."""
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():
        # Plain arithmetic: the compiler fuses it, every exporter knows it.
        total = rows[first] * share[0].unsqueeze(-1)
        for k in range(1, len(steps)):
            total = total + rows[first + steps[k]] * share[k].unsqueeze(-1)
        return total.to(rows.dtype)
    index = torch.stack([first + step for step in steps], dim=-1).flatten(0, 2)  # (B M P, K)
    # On GPUs the library has no gradient of the shares in bfloat16.
    wide = rows.float() if rows.is_cuda and rows.dtype == torch.bfloat16 else rows
    share = share.movedim(0, -1).flatten(0, 2).to(wide.dtype)
    total = F.embedding_bag(index, wide, mode="sum", per_sample_weights=share).to(rows.dtype)
    return total.view(first.shape[0], first.shape[1], first.shape[2], rows.shape[1])


class _ClampGradient(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, bound: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (bound,) = ctx.saved_tensors
        return torch.clamp(gradient, -bound, bound), None


def clamp_gradient(values: Tensor, bound: Tensor) -> Tensor:
    """The same values, their gradient clamped elementwise to ± bound (a tensor without axes) on the way back.

    TorchScript, made for inference, leaves the gradient alone.
    """
    if torch.jit.is_scripting():
        return values
    return _ClampGradient.apply(values, bound)
