"""Where a cell of a feature map lies in the image, to the pixel.

A map of stride S drawn by stretching it over the image is half a cell off: a convolution of stride 2, kernel 3 and
padding 1 centres its output i on input 2i, not between 2i and 2i + 1. So the centres are computed, from the strided
layers that really ran, and maps are drawn there.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

STRIDED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


class Place(NamedTuple):
    """Cell (i, j) of a map is centred on image pixel (offset + i * stride, …), rows first."""

    stride: tuple[float, float]
    offset: tuple[float, float]

    @classmethod
    def stretched(cls, size: tuple[int, int], image: tuple[int, int]) -> "Place":
        """The map laid over the whole image, each cell on its share of it."""
        stride = image[0] / size[0], image[1] / size[1]
        return cls(stride, (stride[0] / 2 - 0.5, stride[1] / 2 - 0.5))


@contextmanager
def places(model: nn.Module, image: tuple[int, int]) -> Iterator[dict[tuple[int, int], Place]]:
    """Fill a dict {size of a map: its place} while the model runs on an image of this size."""
    found = {image: Place((1.0, 1.0), (0.0, 0.0))}

    def listen(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        size, smaller = tuple(inputs[0].shape[-2:]), tuple(output.shape[-2:])
        if smaller in found or size not in found:
            return
        before = found[size]
        kernel, stride, padding = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding))
        found[smaller] = Place(
            (before.stride[0] * stride[0], before.stride[1] * stride[1]),
            (
                before.offset[0] + before.stride[0] * ((kernel[0] - 1) / 2 - padding[0]),
                before.offset[1] + before.stride[1] * ((kernel[1] - 1) / 2 - padding[1]),
            ),
        )

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, STRIDED) and not isinstance(module.padding, str):
                stack.callback(module.register_forward_hook(listen).remove)
        yield found


def draw_maps(
    maps: Tensor, place: Place, image: tuple[int, int], size: tuple[int, int], nearest: bool = False
) -> Tensor:
    """Maps (M, H, W) of an image of `image` pixels, drawn at `size` pixels: (M, *size)."""
    rows = axis(maps.shape[1], place.stride[0], place.offset[0], image[0], size[0], nearest).to(maps)
    columns = axis(maps.shape[2], place.stride[1], place.offset[1], image[1], size[1], nearest).to(maps)
    return rows @ maps @ columns.T


def axis(cells: int, stride: float, offset: float, image: int, size: int, nearest: bool = False) -> Tensor:
    """Weights (size, cells): the value at drawn pixel x is a mix of the two cells whose centres enclose it."""
    x = (torch.arange(size, dtype=torch.float64) + 0.5) * (image / size) - 0.5  # in image pixels
    cell = ((x - offset) / stride).clamp(0, cells - 1)
    if nearest:
        return torch.nn.functional.one_hot((cell + 0.5).floor().long().clamp(max=cells - 1), cells).float()
    return (1 - (cell[:, None] - torch.arange(cells)).abs()).clamp(min=0).float()


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[-2], value[-1])
