"""Super tokens: soft superpixels, and the projection back by the same association (SViT Sec. 3.2).

Features of H x W pixels are cut into cells. Every cell has one super token, and every pixel belongs, softly, to the
nine tokens of the 3x3 cells around its own. Pixels are arranged cell by cell, (B, rows, columns, P, C) with P pixels
per cell, and the association as (B, rows, columns, 9, P): grouping and spreading are then one batched matrix product
each, of a cell's pixels with its nine neighbours, and only the tokens (P times fewer than the pixels) are copied nine
times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.layers.grid import to_features, to_pixels
from saccade.ops.super_tokens import EPS, crop_pixels, fused_group, fused_spread, pad_pixels
from saccade.tokens.trace import AssignmentTrace, AssociationTrace


class SuperTokenizer(nn.Module):
    """Group pixels into one token per cell. Also returns the association, for `spread` and for `explain`.

    Args:
        cell: side of a cell in pixels.
        iterations: rounds of association and update; 0 keeps the cell means.
        mask_border: leave neighbours outside the map out of the softmax. The official weights were trained with them in
            it: their score is 0, and their part of the association is lost.
        detach: treat the association as a constant in backward, as the authors' code does; the gradient then reaches
            the pixels as values of the weighted mean only.
    """

    def __init__(self, cell: int, iterations: int = 1, mask_border: bool = False, detach: bool = True):
        super().__init__()
        self.cell = cell
        self.iterations = iterations
        self.mask_border = mask_border
        self.detach = detach

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, rows, columns, C), association (B, rows, columns, 9, P)."""
        return group(features, self.cell, self.iterations, self.mask_border, self.detach)

    def spread(self, tokens: Tensor, association: Tensor, height: int, width: int) -> Tensor:
        """tokens (B, rows, columns, C), association of `forward` -> features (B, C, H, W)."""
        return spread(tokens, association, self.cell, height, width)

    def trace(self, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> AssociationTrace:
        """The trace of one call of this module."""
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


class DenseSuperTokenizer(nn.Module):
    """Super tokens with an association of every pixel to every token, at a cost of 2 M N C per iteration (SViT Eq. 7).

    SViT Eqs. 5-6 without the restriction to 3x3 cells; with `ssn` SViT Eq. 4 instead of Eq. 5, the similarity of
    superpixel sampling networks (SSN): exp(-|pixel - token|²). Its normalised columns give the tokens, its normalised
    rows put them back. `iterations` and `detach` as in `SuperTokenizer`.
    """

    def __init__(self, cell: int, iterations: int = 1, ssn: bool = False, detach: bool = True):
        super().__init__()
        if iterations < 1:
            raise ValueError(f"a dense association needs iterations >= 1, got {iterations}. Use association='sparse'.")
        self.cell = cell
        self.iterations = iterations
        self.ssn = ssn
        self.detach = detach

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, rows, columns, C), association (B, N, M), assignment (B, M, N)."""
        pixels, means = to_pixels(features), to_cells(features, self.cell).mean(3)
        grid, tokens = means.shape[1:3], means.flatten(1, 2)
        source, seeds = (pixels.detach(), tokens.detach()) if self.detach else (pixels, tokens)
        association = assignment = pixels
        for iteration in range(self.iterations):
            association, assignment = self.associate(source, seeds)
            tokens = seeds = torch.matmul(assignment, pixels if iteration + 1 == self.iterations else source)
        return tokens.unflatten(1, grid), association, assignment

    def associate(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """pixels (B, N, C), tokens (B, M, C) -> association (B, N, M), sums to 1 over tokens, and assignment (B, M, N),
        sums to 1 over pixels."""
        products = torch.matmul(pixels, tokens.transpose(1, 2))  # (B, N, M)
        if self.ssn:
            squares = pixels.square().sum(2).unsqueeze(2) + tokens.square().sum(2).unsqueeze(1)
            distance = 2 * products - squares  # SViT Eq. 4: Q is its exponential, normalised below
            return distance.softmax(2), distance.softmax(1).transpose(1, 2)
        association = (products * pixels.shape[2] ** -0.5).softmax(2)  # SViT Eq. 5
        return association, (association / (association.sum(1, keepdim=True) + EPS)).transpose(1, 2)  # SViT Eq. 6

    def spread(self, tokens: Tensor, association: Tensor, height: int, width: int) -> Tensor:
        """tokens (B, rows, columns, C), association (B, N, M) -> features (B, C, H, W)."""
        return to_features(torch.matmul(association, tokens.flatten(1, 2)), height, width)  # SViT Eq. 11

    def trace(self, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> AssignmentTrace:
        """The trace of one call of this module."""
        tokens, _, assignment = output
        height, width = inputs[0].shape[2:]
        return AssignmentTrace(assignment, (height, width), tokens=tokens.flatten(1, 2))


@fused_group
def group(
    features: Tensor, cell: int, iterations: int = 1, mask_border: bool = False, detach: bool = True
) -> tuple[Tensor, Tensor]:
    """features (B, C, H, W) -> tokens (B, rows, columns, C), association (B, rows, columns, 9, P): SViT Eqs. 5-6.

    Without iterations the association is empty.
    """
    cells = to_cells(features, cell)  # (B, rows, columns, P, C)
    tokens = cells.mean(3)  # the initial super tokens of SViT Sec. 3.2.1
    source = cells.detach() if detach else cells
    seeds = tokens.detach() if detach else tokens
    association = torch.empty(0, dtype=features.dtype, device=features.device)
    for iteration in range(iterations):
        association = associate(source, seeds, mask_border)
        tokens = seeds = gather(cells if iteration + 1 == iterations else source, association)
    return tokens, association


def associate(cells: Tensor, tokens: Tensor, mask_border: bool = False) -> Tensor:
    """SViT Eq. 5 over the 3x3 cells around a pixel: (B, rows, columns, 9, P), sums to 1 over the nine tokens."""
    near = neighbours(tokens) * tokens.shape[-1] ** -0.5
    scores = torch.matmul(near, cells.transpose(3, 4))
    if mask_border:
        inside = neighbours(torch.ones_like(tokens[:1, :, :, :1]))  # (1, rows, columns, 9, 1)
        scores = scores.masked_fill(inside == 0, float("-inf"))
    return scores.softmax(3).to(cells.dtype)  # SViT Eq. 5: softmax over tokens of X Sᵀ / √C


def gather(cells: Tensor, association: Tensor) -> Tensor:
    """SViT Eq. 6: tokens (B, rows, columns, C) as association-weighted means of the pixels around them."""
    total = collect(torch.matmul(association, cells))  # SViT Eq. 6: Qᵀ X, then divided by the column sums of Q
    precise = torch.promote_types(association.dtype, torch.float32)
    weight = collect(association.sum(4, keepdim=True, dtype=precise))
    return total / (weight + EPS).to(total.dtype)


@fused_spread
def spread(tokens: Tensor, association: Tensor, cell: int, height: int, width: int) -> Tensor:
    """SViT Eq. 11: every pixel becomes the association-weighted sum of nine tokens.

    tokens (B, rows, columns, C), association (B, rows, columns, 9, P) -> features (B, C, H, W). With an empty
    association (no iterations) every pixel takes the token of its own cell.
    """
    if association.numel() == 0:
        pixels = tokens.unsqueeze(3).expand(-1, -1, -1, cell * cell, -1)
    else:
        pixels = torch.matmul(association.transpose(3, 4), neighbours(tokens))  # SViT Eq. 11: Q Attn(S)
    return from_cells(pixels, cell, height, width)


def to_cells(features: Tensor, cell: int) -> Tensor:
    """features (B, C, H, W) -> (B, rows, columns, P, C), padded with zeros at the bottom and right."""
    height, width = features.shape[2], features.shape[3]
    rows, columns = (height + cell - 1) // cell, (width + cell - 1) // cell
    pixels = pad_pixels(features.permute(0, 2, 3, 1), rows * cell, columns * cell)
    pixels = pixels.unflatten(2, (columns, cell)).unflatten(1, (rows, cell))  # (B, rows, cell, columns, cell, C)
    return pixels.transpose(2, 3).flatten(3, 4)


def from_cells(cells: Tensor, cell: int, height: int, width: int) -> Tensor:
    """(B, rows, columns, P, C) -> features (B, C, H, W) without the padding, channels-last in memory."""
    pixels = cells.unflatten(3, (cell, cell)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return crop_pixels(pixels, height, width).permute(0, 3, 1, 2)


def neighbours(tokens: Tensor) -> Tensor:
    """tokens (B, rows, columns, C) -> (B, rows, columns, 9, C): the 3x3 around each, zeros outside the map."""
    rows, columns = tokens.shape[1], tokens.shape[2]
    padded = F.pad(tokens, (0, 0, 1, 1, 1, 1))
    return torch.stack([padded[:, i // 3 : i // 3 + rows, i % 3 : i % 3 + columns] for i in range(9)], dim=3)


def collect(parts: Tensor) -> Tensor:
    """The transpose of `neighbours`: parts (B, rows, columns, 9, C) for nine tokens -> sums (B, rows, columns, C)."""
    rows, columns = parts.shape[1], parts.shape[2]
    padded = F.pad(parts, (0, 0, 0, 0, 1, 1, 1, 1)).unbind(3)
    # A cell's part for its neighbour i reaches that neighbour from its own neighbour 8 - i.
    total = padded[0][:, 2 : 2 + rows, 2 : 2 + columns]
    for i in range(1, 9):
        j = 8 - i
        total = total + padded[i][:, j // 3 : j // 3 + rows, j % 3 : j % 3 + columns]
    return total
