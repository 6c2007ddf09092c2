"""What a family reports of one step: the link between pixels and tokens, drawable as maps (B, M, H, W).

A module that groups pixels has a method `trace(inputs, output)` that turns one call of itself into one of these
tuples. It is called from outside, by `saccade.record`; forward() never knows. `name` and `step` are filled in there.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AssignmentTrace(NamedTuple):
    """VT and PaCa: how much every pixel counts for every token."""

    assignment: Tensor  # (B, M, N), sums to 1 over pixels
    size: tuple[int, int]  # (H, W) of the grid, N = H * W
    scores: Tensor | None = None  # (B, M, N), the assignment before its softmax
    tokens: Tensor | None = None  # (B, M, D)
    name: str = ""
    step: int = 0

    def maps(self) -> Tensor:
        """(B, M, H, W): each token's map sums to 1 over the image."""
        return self.assignment.unflatten(2, self.size)


class AssociationTrace(NamedTuple):
    """SViT: how much every pixel belongs to the 3x3 super tokens around its own cell, row by row."""

    association: Tensor  # (B, N, 9)
    size: tuple[int, int]  # (H, W) of the grid, N = H * W
    grid: tuple[int, int]  # rows and columns of super tokens
    cell: int  # pixels along the side of a cell
    tokens: Tensor | None = None  # (B, M, D), M = rows * columns
    name: str = ""
    step: int = 0

    def maps(self) -> Tensor:
        """(B, M, H, W): what the model really does, so a pixel's shares sum to 1 inside and to less at the border.

        A border cell has fewer than 9 neighbours, yet the official models leave the missing ones in the softmax;
        their share is lost, and lost here too.
        """
        (height, width), (rows, columns) = self.size, self.grid
        device = self.association.device
        row = torch.arange(height, device=device)[:, None] // self.cell  # cell of every pixel
        column = torch.arange(width, device=device)[None, :] // self.cell
        step = torch.arange(9, device=device)
        # Count cells on a grid with a ring around it: neighbour (-1, -1) of cell (0, 0) is ring cell (0, 0).
        index = (row[..., None] + step // 3) * (columns + 2) + column[..., None] + step % 3  # (H, W, 9)
        batch = self.association.shape[0]
        ringed = self.association.new_zeros(batch, height * width, (rows + 2) * (columns + 2))
        ringed.scatter_(2, index.reshape(1, -1, 9).expand(batch, -1, -1), self.association)
        inside = ringed.unflatten(2, (rows + 2, columns + 2))[:, :, 1:-1, 1:-1]  # (B, N, rows, columns)
        return inside.flatten(2).transpose(1, 2).unflatten(2, (height, width))


class RegionTrace(NamedTuple):
    """SparseFormer: where every token looks, and the points it samples there."""

    regions: Tensor  # (B, M, 4), x0 y0 x1 y1 in units of the image
    points: Tensor  # (B, M, P, 2), x y in units of the image
    size: tuple[int, int]  # (H, W) of the feature map that was sampled
    tokens: Tensor | None = None  # (B, M, D)
    name: str = ""
    step: int = 0

    def maps(self, bandwidth: float = 1 / 28) -> Tensor:
        """(B, M, H, W): density of each token's points by a top-hat kernel of radius `bandwidth` of the image side."""
        (height, width), device = self.size, self.points.device
        y = (torch.arange(height, device=device) + 0.5) / height
        x = (torch.arange(width, device=device) + 0.5) / width
        maps = []
        for points in self.points.unbind(0):  # image by image: (M, P, H, W) once is large enough
            near_x = (x - points[..., 0, None]).square()[..., None, :]  # (M, P, 1, W)
            near_y = (y - points[..., 1, None]).square()[..., :, None]  # (M, P, H, 1)
            maps.append((near_x + near_y <= bandwidth**2).float().mean(1))
        return torch.stack(maps)


Trace = AssignmentTrace | AssociationTrace | RegionTrace
