"""Traces: the link between pixels and tokens of one grouping step, drawable as maps (B, M, H, W).

Maps of a clip are (B, M, T, H, W).

A module that groups pixels has a method `trace(inputs, output)` that turns one call of itself into one of these
tuples. `saccade.record` calls it from a forward hook; forward() itself is not involved. `name` and `step` are filled in
there. `Trace` is a union of classes: `isinstance` narrows it.
"""

from typing import NamedTuple, TypeVar

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
    cell: int  # side of a cell in pixels
    tokens: Tensor | None = None  # (B, M, D), M = rows * columns
    name: str = ""
    step: int = 0

    def maps(self) -> Tensor:
        """(B, M, H, W): what a pixel takes from every token; sums to 1 over the tokens, and to less at the border.

        A border cell has fewer than 9 neighbours. The official models leave the missing ones in the softmax, and lose
        their part of the association; so do these maps.
        """
        (height, width), (rows, columns) = self.size, self.grid
        device = self.association.device
        row = torch.arange(height, device=device)[:, None] // self.cell  # cell of every pixel
        column = torch.arange(width, device=device)[None, :] // self.cell
        neighbour = torch.arange(9, device=device)
        # Indices into a grid padded by one cell: neighbour (-1, -1) of cell (0, 0) is the padded cell (0, 0).
        index = (row[..., None] + neighbour // 3) * (columns + 2) + column[..., None] + neighbour % 3  # (H, W, 9)
        batch = self.association.shape[0]
        padded = self.association.new_zeros(batch, height * width, (rows + 2) * (columns + 2))
        padded.scatter_(2, index.reshape(1, -1, 9).expand(batch, -1, -1), self.association)
        inside = padded.unflatten(2, (rows + 2, columns + 2))[:, :, 1:-1, 1:-1]  # (B, N, rows, columns)
        return inside.flatten(2).transpose(1, 2).unflatten(2, (height, width))


class RegionTrace(NamedTuple):
    """SparseFormer: the region of every token, and the points it samples there."""

    regions: Tensor  # (B, M, 4), x0 y0 x1 y1 in units of the image
    points: Tensor  # (B, M, P, 2), x y in units of the image
    size: tuple[int, int]  # (H, W) of the sampled features
    tokens: Tensor | None = None  # (B, M, D)
    name: str = ""
    step: int = 0

    def maps(self, bandwidth: float = 1 / 28) -> Tensor:
        """(B, M, H, W): density of each token's points by a top-hat kernel of radius `bandwidth` of the image side."""
        # One image at a time: (M, P, H, W) is large enough.
        maps = [_is_near(points, *self.size, bandwidth).mean(1) for points in self.points.unbind(0)]
        return torch.stack(maps) if maps else self.points.new_empty(0, num_tokens(self), *self.size)


class TubeTrace(NamedTuple):
    """VideoSparseFormer: the region of every token in space and time, and the points it samples there."""

    regions: Tensor  # (B, M, 6), x0 y0 t0 x1 y1 t1 in units of the clip
    points: Tensor  # (B, M, P, 3), x y t in units of the clip
    size: tuple[int, int, int]  # (T, H, W) of the sampled features
    tokens: Tensor | None = None  # (B, M, D)
    name: str = ""
    step: int = 0

    def maps(self, bandwidth: float = 1 / 28) -> Tensor:
        """(B, M, T, H, W): density of each token's points, frame by frame.

        Within a frame by a top-hat kernel, as in `RegionTrace.maps`; a point between two frames counts for both, with
        the weights by which it is interpolated. The sum over frames is the density of all points inside the clip.
        """
        frames, height, width = self.size
        frame = torch.arange(frames, device=self.points.device)
        maps = []
        for points in self.points.unbind(0):
            position = points[..., 2, None] * frames - 0.5  # frame i is centred at i
            weight = (1 - (position - frame).abs()).clamp(min=0)  # (M, P, T)
            near = _is_near(points[..., :2], height, width, bandwidth).flatten(2)  # (M, P, N)
            density = torch.matmul(weight.transpose(1, 2).to(near.dtype), near) / points.shape[1]
            maps.append(density.unflatten(2, (height, width)))
        return torch.stack(maps) if maps else self.points.new_empty(0, num_tokens(self), *self.size)


def _is_near(points: Tensor, height: int, width: int, radius: float) -> Tensor:
    """points (M, P, 2) -> (M, P, H, W): 1 where the centre of a pixel is within `radius` of the point, else 0."""
    y = (torch.arange(height, device=points.device) + 0.5) / height
    x = (torch.arange(width, device=points.device) + 0.5) / width
    dx2 = (x - points[..., 0, None]).square()[..., None, :]  # (M, P, 1, W)
    dy2 = (y - points[..., 1, None]).square()[..., :, None]  # (M, P, H, 1)
    return (dx2 + dy2 <= radius**2).float()


Trace = AssignmentTrace | AssociationTrace | RegionTrace | TubeTrace
TraceT = TypeVar("TraceT", AssignmentTrace, AssociationTrace, RegionTrace, TubeTrace)


def expect_trace(trace: Trace, kind: type[TraceT]) -> TraceT:
    """The trace, narrowed to one kind; TypeError if it is another."""
    if not isinstance(trace, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(trace).__name__} of {trace.name or 'an unnamed block'}.")
    return trace


def num_tokens(trace: Trace) -> int:
    """Tokens per image of a trace."""
    if isinstance(trace, AssociationTrace):
        return trace.grid[0] * trace.grid[1]
    return (trace.assignment if isinstance(trace, AssignmentTrace) else trace.regions).shape[1]
