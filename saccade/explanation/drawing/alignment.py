"""Image pixel on which each cell of a feature map is centred.

Stretching a stride-S map over the image is off by half a cell: a convolution of stride 2, kernel 3 and padding 1
centres its output i on input 2i, not between 2i and 2i + 1. The centres are computed from the strided layers that ran.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STRIDED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


class Alignment(NamedTuple):
    """Cell (i, j) of a map is centred on image pixel (offset + i * stride, …), rows first."""

    stride: tuple[float, float]
    offset: tuple[float, float]

    @classmethod
    def stretched(cls, size: tuple[int, int], image_size: tuple[int, int]) -> "Alignment":
        """A map that covers the image exactly, each cell an equal part of it."""
        stride = image_size[0] / size[0], image_size[1] / size[1]
        return cls(stride, (stride[0] / 2 - 0.5, stride[1] / 2 - 0.5))


@contextmanager
def record_alignment(model: nn.Module, image_size: tuple[int, int]) -> Iterator[dict[tuple[int, ...], Alignment]]:
    """Fill a dict {map size: alignment} while the model runs on an image of this size."""
    alignments: dict[tuple[int, ...], Alignment] = {image_size: Alignment((1.0, 1.0), (0.0, 0.0))}

    def hook(layer: Any, inputs: tuple, output: Tensor) -> None:
        input_size, output_size = tuple(inputs[0].shape[-2:]), tuple(output.shape[-2:])
        if output_size in alignments or input_size not in alignments:
            return
        before = alignments[input_size]
        kernel, stride, padding = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding))
        alignments[output_size] = Alignment(
            (before.stride[0] * stride[0], before.stride[1] * stride[1]),
            (
                before.offset[0] + before.stride[0] * ((kernel[0] - 1) / 2 - padding[0]),
                before.offset[1] + before.stride[1] * ((kernel[1] - 1) / 2 - padding[1]),
            ),
        )

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, STRIDED) and not isinstance(module.padding, str):
                stack.callback(module.register_forward_hook(hook).remove)
        yield alignments


def resample_maps(
    maps: Tensor, alignment: Alignment, image_size: tuple[int, int], size: tuple[int, int], nearest: bool = False
) -> Tensor:
    """Maps (M, H, W) of an image of `image_size` pixels, resampled to `size` pixels: (M, *size)."""
    rows, columns = (
        axis_weights(
            maps.shape[1 + axis], alignment.stride[axis], alignment.offset[axis], image_size[axis], size[axis], nearest
        ).to(maps)
        for axis in (0, 1)
    )
    return rows @ maps @ columns.T


def axis_weights(cells: int, stride: float, offset: float, image_size: int, size: int, nearest: bool = False) -> Tensor:
    """Linear interpolation weights (size, cells) along one axis; with `nearest`, one-hot at the nearest cell centre."""
    x = (torch.arange(size, dtype=torch.float64) + 0.5) * (image_size / size) - 0.5  # in image pixels
    cell = ((x - offset) / stride).clamp(0, cells - 1)
    if nearest:
        return torch.nn.functional.one_hot((cell + 0.5).floor().long().clamp(max=cells - 1), cells).float()
    return (1 - (cell[:, None] - torch.arange(cells)).abs()).clamp(min=0).float()


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[-2], value[-1])
