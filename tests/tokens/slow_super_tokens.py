"""Super token attention with `unfold` and `fold` copies of the features: the reference for results and speed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models.svit import SuperTokenAttention


def unfold9(tokens: Tensor) -> Tensor:
    """(B, C, rows, columns) -> (B, C, 9, rows * columns)."""
    return F.unfold(tokens, 3, padding=1).unflatten(1, (tokens.shape[1], 9))


def fold9(parts: Tensor, rows: int, columns: int) -> Tensor:
    """(B, C, 9, rows * columns) -> sums (B, C, rows, columns)."""
    return F.fold(parts.flatten(1, 2), (rows, columns), 3, padding=1)


def slow_attention(module: SuperTokenAttention, features: Tensor) -> Tensor:
    """The output of `module`, with the association as in Algorithm 1 of the paper."""
    cell, (_, dim, height, width) = module.tokenizer.cell, features.shape
    features = F.pad(features, (0, -width % cell, 0, -height % cell))
    rows, columns = features.shape[2] // cell, features.shape[3] // cell
    cells = F.unfold(features, cell, stride=cell).unflatten(1, (dim, cell * cell))  # (B, C, P, m)
    cells = cells.permute(0, 3, 2, 1)  # (B, m, P, C)
    tokens = F.adaptive_avg_pool2d(features, (rows, columns))
    with torch.no_grad():
        for i in range(module.tokenizer.iterations):
            near = unfold9(tokens).permute(0, 3, 1, 2)  # (B, m, C, 9)
            association = (cells @ near * dim**-0.5).softmax(-1)  # (B, m, P, 9)
            weight = fold9(association.sum(2).permute(0, 2, 1)[:, None], rows, columns)  # (B, 1, rows, columns)
            if i + 1 < module.tokenizer.iterations:
                parts = (cells.transpose(2, 3) @ association).permute(0, 2, 3, 1)
                tokens = fold9(parts, rows, columns) / (weight + 1e-12)
    parts = (cells.transpose(2, 3) @ association).permute(0, 2, 3, 1)  # (B, C, 9, m)
    tokens = fold9(parts, rows, columns) / (weight + 1e-12)
    tokens = module.attention(tokens.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (rows, columns))
    near = unfold9(tokens).permute(0, 3, 1, 2)  # (B, m, C, 9)
    pixels = (near @ association.transpose(2, 3)).permute(0, 2, 3, 1).flatten(1, 2)  # (B, C * P, m)
    return F.fold(pixels, (rows * cell, columns * cell), cell, stride=cell)[:, :, :height, :width]
