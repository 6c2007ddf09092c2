"""Learned position embeddings that are interpolated to other grid sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AbsolutePosition(nn.Module):
    """One learned vector per grid position, added to the features; resized bilinearly to other grids."""

    def __init__(self, dim: int, height: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, dim, height, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        table = self.table
        if table.shape[2] != features.shape[2] or table.shape[3] != features.shape[3]:
            table = F.interpolate(table, (features.shape[2], features.shape[3]), mode="bilinear", align_corners=False)
        return features + table


class RelativePosition(nn.Module):
    """One learned bias per head and offset between two grid positions, resized bicubically to other grids."""

    def __init__(self, num_heads: int, rows: int, columns: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, num_heads, 2 * rows - 1, 2 * columns - 1))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, rows: int, columns: int) -> Tensor:
        """The bias (heads, M, M) of a grid of M = rows * columns positions."""
        table = self.table
        if table.shape[2] != 2 * rows - 1 or table.shape[3] != 2 * columns - 1:
            table = F.interpolate(table, (2 * rows - 1, 2 * columns - 1), mode="bicubic", align_corners=False)
        row = torch.arange(rows, device=table.device)
        column = torch.arange(columns, device=table.device)
        row_offset = row[:, None] - row[None, :] + rows - 1  # (rows, rows)
        column_offset = column[:, None] - column[None, :] + columns - 1  # (columns, columns)
        bias = table[0][:, row_offset][:, :, :, column_offset]  # (heads, rows, rows, columns, columns)
        return bias.permute(0, 1, 3, 2, 4).reshape(-1, rows * columns, rows * columns)
