"""Equations as loops over lists of Python floats, one loop per index, with the weights of a layer."""

from math import exp, sqrt

import torch
from torch import Tensor, nn

from saccade.layers.linear import GroupedLinear, LinearNorm, ListNorm

Rows = list[list[float]]


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Randomise every weight and running statistic, in float64, for inference: no 1 or 0 can hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            spread = torch.rand if name.endswith("running_var") else torch.randn
            tensor.copy_(spread(tensor.shape, generator=generator, dtype=torch.float64) * 0.5 + 0.1)
    return module


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores: list[float]) -> list[float]:
    powers = [exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def relu(rows: Rows) -> Rows:
    return [[max(value, 0.0) for value in row] for row in rows]


def add(a: Rows, b: Rows) -> Rows:
    return [[x + y for x, y in zip(one, other, strict=True)] for one, other in zip(a, b, strict=True)]


def mix(weights: Rows, rows: Rows) -> Rows:
    """Every row of the result is a weighted sum of rows."""
    columns = list(zip(*rows, strict=True))
    return [[dot(weight, list(column)) for column in columns] for weight in weights]


def attend(query: Rows, key: Rows, value: Rows, scale: float) -> Rows:
    """softmax over the keys of query · key, times the values."""
    return mix([softmax([dot(q, k) * scale for k in key]) for q in query], value)


def attend_in_heads(query: Rows, key: Rows, value: Rows, heads: int) -> Rows:
    """`attend` for the channels of every head, scaled by the root of their number, concatenated."""
    output: Rows = [[] for _ in query]
    for head in range(heads):

        def of_head(rows: Rows, head: int = head) -> Rows:
            width = len(rows[0]) // heads
            return [row[head * width : (head + 1) * width] for row in rows]

        mixed = attend(of_head(query), of_head(key), of_head(value), 1 / sqrt(len(query[0]) // heads))
        output = [row + more for row, more in zip(output, mixed, strict=True)]
    return output


def deal(rows: Rows, heads: int) -> tuple[Rows, Rows]:
    """Split channels that hold, head by head, a first and a second part of equal width."""
    width = len(rows[0]) // heads // 2
    first, second = [], []
    for row in rows:
        parts = [row[i : i + width] for i in range(0, len(row), width)]
        first.append([value for part in parts[0::2] for value in part])
        second.append([value for part in parts[1::2] for value in part])
    return first, second


def linear(rows: Rows, layer: nn.Linear | GroupedLinear) -> Rows:
    if isinstance(layer, nn.Linear):
        assert layer.bias is None
        return [[dot(row, weight) for weight in layer.weight.tolist()] for row in rows]
    output = []
    for row in rows:
        width = len(row) // layer.groups
        out = []
        for group, matrix in enumerate(layer.weight.tolist()):
            part = row[group * width : (group + 1) * width]
            out += [dot(part, list(column)) for column in zip(*matrix, strict=True)]
        output.append(out)
    return output


def norm(rows: Rows, layer: ListNorm) -> Rows:
    bn = layer.bn
    if isinstance(bn, nn.Identity):
        return rows
    statistics = zip(
        bn.running_mean.tolist(), bn.running_var.tolist(), bn.weight.tolist(), bn.bias.tolist(), strict=True
    )
    affine = [(mean, gain / sqrt(variance + bn.eps), bias) for mean, variance, gain, bias in statistics]
    return [[(v - mean) * gain + bias for v, (mean, gain, bias) in zip(row, affine, strict=True)] for row in rows]


def linear_norm(rows: Rows, layer: LinearNorm | nn.Identity) -> Rows:
    return rows if isinstance(layer, nn.Identity) else norm(linear(rows, layer.linear), layer.norm)


def rows_of(features: Tensor) -> Rows:
    """One image (C, H, W) as a list of pixels, row by row."""
    return features.flatten(1).t().tolist()


def agree(ours: Tensor, slow: list, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, torch.tensor(slow, dtype=torch.float64), rtol=tolerance, atol=tolerance)
