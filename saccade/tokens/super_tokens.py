"""Super tokens: soft superpixels, and the way back by the same association (SViT, SVIT-01 … SVIT-15).

A map of H x W pixels is cut into cells; every cell has one super token, and every pixel belongs, softly, to the
nine tokens of the 3x3 cells around its own. Pixels are kept cell by cell, (B, rows, columns, P, C) with P pixels in
a cell, and the association as (B, rows, columns, 9, P): then grouping and putting back are one batched matrix
product each, of a cell's pixels with its nine neighbours, the softmax over nine runs across adjacent pixels, and only
the tokens (P times fewer than the pixels) are ever copied nine times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import allowed, suits
from saccade.kernels import super_tokens as kernels
from saccade.tokens.trace import AssociationTrace


class SuperTokenizer(nn.Module):
    """Group pixels into one token a cell; the association comes back too, for the way back and for `explain`.

    What is differentiated: the pixels as values of the weighted mean. The association, and with it the first
    tokens (cell means) and the pixels as its arguments, is a constant to autograd, as in the authors' code
    (`detach=False` differentiates everything). `mask_border=True` keeps neighbours outside the map out of the
    softmax; the official weights were trained with them in (score 0, their share lost).
    """

    def __init__(self, cell: int, iterations: int = 1, mask_border: bool = False, detach: bool = True):
        super().__init__()
        self.cell = cell
        self.iterations = iterations
        self.mask_border = mask_border
        self.detach = detach

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, rows, columns, C), association (B, rows, columns, 9, P)."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if self.fits_kernel(features):
                return kernels.group(features.permute(0, 2, 3, 1), self.cell, 1e-12)
        cells = to_cells(features, self.cell)  # (B, rows, columns, P, C)
        tokens = cells.mean(3)
        source = cells.detach() if self.detach else cells
        seeds = tokens.detach() if self.detach else tokens
        association = torch.empty(0, dtype=features.dtype, device=features.device)
        for iteration in range(self.iterations):
            association = associate(source, seeds, self.mask_border)
            last = iteration + 1 == self.iterations
            tokens = gather(cells if last else source, association)
            seeds = tokens
        return tokens, association

    def fits_kernel(self, features: Tensor) -> bool:
        """Whether the fused kernel computes what this module is asked for."""
        plain = self.iterations == 1 and self.detach and not self.mask_border
        layout = features.is_contiguous(memory_format=torch.channels_last)
        small = self.cell <= 16 and features.shape[1] <= 256
        return plain and layout and small and suits(features) and allowed("super_tokens")

    def trace(self, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> AssociationTrace:
        """What one call of this module says about pixels and tokens."""
        (features,), (tokens, association) = inputs, output
        height, width = features.shape[2:]
        rows, columns = tokens.shape[1:3]
        if self.iterations == 0:  # no association: every pixel belongs to its own cell
            association = tokens.new_zeros(*tokens.shape[:3], 9, self.cell**2)
            association[:, :, :, 4] = 1
        grid = from_cells(association.transpose(3, 4), self.cell, height, width)  # (B, 9, H, W)
        return AssociationTrace(
            grid.flatten(2).transpose(1, 2), (height, width), (rows, columns), self.cell, tokens.flatten(1, 2)
        )


def to_cells(features: Tensor, cell: int) -> Tensor:
    """features (B, C, H, W) -> (B, rows, columns, P, C), zeros at the bottom and right where the cell does not fit."""
    height, width = features.shape[2], features.shape[3]
    right, bottom = -width % cell, -height % cell
    pixels = features.permute(0, 2, 3, 1)
    if right > 0 or bottom > 0:
        pixels = F.pad(pixels, (0, 0, 0, right, 0, bottom))
    pixels = pixels.unflatten(2, (-1, cell)).unflatten(1, (-1, cell))  # (B, rows, cell, columns, cell, C)
    return pixels.transpose(2, 3).flatten(3, 4)


def from_cells(cells: Tensor, cell: int, height: int, width: int) -> Tensor:
    """(B, rows, columns, P, C) -> features (B, C, H, W), the padding cut off; channels-last in memory."""
    pixels = cells.unflatten(3, (cell, cell)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return pixels[:, :height, :width].permute(0, 3, 1, 2)


def neighbours(tokens: Tensor) -> Tensor:
    """tokens (B, rows, columns, C) -> (B, rows, columns, 9, C): the 3x3 around each, zeros outside the map."""
    rows, columns = tokens.shape[1], tokens.shape[2]
    ringed = F.pad(tokens, (0, 0, 1, 1, 1, 1))
    return torch.stack([ringed[:, i // 3 : i // 3 + rows, i % 3 : i % 3 + columns] for i in range(9)], dim=3)


def collect(sent: Tensor) -> Tensor:
    """The reverse: (B, rows, columns, 9, C) sent to nine neighbours -> their sums (B, rows, columns, C)."""
    rows, columns = sent.shape[1], sent.shape[2]
    ringed = F.pad(sent, (0, 0, 0, 0, 1, 1, 1, 1)).unbind(3)
    # What a cell sends to its neighbour i, that neighbour receives from its own neighbour 8 - i.
    total = ringed[0][:, 2 : 2 + rows, 2 : 2 + columns]
    for i in range(1, 9):
        j = 8 - i
        total = total + ringed[i][:, j // 3 : j // 3 + rows, j % 3 : j % 3 + columns]
    return total


def associate(cells: Tensor, tokens: Tensor, mask_border: bool = False) -> Tensor:
    """Softmax over the nine neighbours of pixel · token / sqrt(C): (B, rows, columns, 9, P) (SVIT-03, SVIT-05)."""
    near = neighbours(tokens) * tokens.shape[-1] ** -0.5
    scores = torch.matmul(near, cells.transpose(3, 4))
    if mask_border:
        inside = neighbours(torch.ones_like(tokens[:1, :, :, :1]))  # (1, rows, columns, 9, 1)
        scores = scores.masked_fill(inside == 0, float("-inf"))
    return scores.softmax(3).to(cells.dtype)


def gather(cells: Tensor, association: Tensor, eps: float = 1e-12) -> Tensor:
    """Tokens as association-weighted means of the pixels around them: (B, rows, columns, C) (SVIT-04, SVIT-06)."""
    total = collect(torch.matmul(association, cells))
    precise = torch.promote_types(association.dtype, torch.float32)
    weight = collect(association.sum(4, keepdim=True, dtype=precise))
    return total / (weight + eps).to(total.dtype)


def spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
    """Put tokens back: every pixel takes its shares of nine tokens, (B, rows, columns, C) -> (B, C, H, W) (SVIT-15).

    Without an association (no iterations) every pixel takes the token of its own cell.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if association.numel() > 0 and suits(tokens, association) and allowed("super_tokens"):
            return kernels.spread(tokens.contiguous(), association, cell, height, width).permute(0, 3, 1, 2)
    if association.numel() == 0:
        pixels = tokens.unsqueeze(3).expand(-1, -1, -1, cell * cell, -1)
    else:
        pixels = torch.matmul(association.transpose(3, 4), neighbours(tokens))
    return from_cells(pixels, cell, height, width)
