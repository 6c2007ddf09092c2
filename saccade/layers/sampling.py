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


def sample(features: Tensor, points: Tensor) -> Tensor:
    """features (B, C, H, W) at points (B, M, P, 2), x y in units of the map -> (B, M, P, C).

    Or features (B, C, T, H, W) at points (B, M, P, 3), x y t. The result has the type of the features.
    """
    index, share = neighbours(points, features.shape[2:])  # (B, M, P, K) each
    pixels = features.flatten(2).transpose(1, 2).flatten(0, 1)  # (B N, C), a view when channels-last
    return weighted_rows(pixels, index, share)


def neighbours(points: Tensor, size: list[int]) -> tuple[Tensor, Tensor]:
    """The pixels around each point: their places in the list of all pixels and their shares, (B, M, P, K) each.

    points (B, M, P, A) in the order x, y, t; size of the map in the order of memory, (T,) H, W.
    """
    index = torch.arange(points.shape[0], device=points.device).view(-1, 1, 1, 1)  # the slowest axis is the image
    share = torch.ones(1, 1, 1, 1, dtype=points.dtype, device=points.device)
    for axis, length in enumerate(size):
        at = points[..., len(size) - 1 - axis] * length - 0.5  # pixel i is centred at i
        first = at.long().clamp(0, length - 2 if length > 1 else 0)  # of the two neighbours, also far outside
        near = first.unsqueeze(-1) + torch.arange(2 if length > 1 else 1, device=points.device)  # (B, M, P, 2)
        part = F.relu(1 - (at.unsqueeze(-1) - near).abs())
        index = (index.unsqueeze(-1) * length + near.unsqueeze(-2)).flatten(-2)
        share = (share.unsqueeze(-1) * part.unsqueeze(-2)).flatten(-2)
    return index, share


def weighted_rows(rows: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """rows (N, C), index and share (B, M, P, K) -> the sums of K rows each, (B, M, P, C)."""
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():
        # Plain arithmetic: the compiler fuses it, every exporter knows it.
        total = rows[index[..., 0]] * share[..., 0, None]
        for k in range(1, index.shape[-1]):
            total = total + rows[index[..., k]] * share[..., k, None]
        return total.to(rows.dtype)
    batch, tokens, points, count = index.shape
    total = F.embedding_bag(
        index.reshape(-1, count), rows, mode="sum", per_sample_weights=share.reshape(-1, count).to(rows.dtype)
    )
    return total.view(batch, tokens, points, rows.shape[1])


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
