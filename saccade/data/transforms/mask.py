"""One picture and its mask -> uint8 tensors, changed alike: torchvision's transforms v2, which know masks.

Resized so that the shorter side is a random multiple of a base, cropped where no class fills the window, mirrored,
and distorted in colour, as the segmentation recipes of all four papers do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from saccade.data.sources.masks import IGNORE

PairTransform = Callable[[Image.Image, np.ndarray], tuple[Tensor, Tensor]]  # -> (3, H, W) uint8, (H, W) uint8


class RandomShorterSide(v2.Transform):
    """The shorter side to `base` (None: what it is) times a random factor, the aspect kept."""

    def __init__(self, base: int | None, scale: tuple[float, float]):
        super().__init__()
        self.base, self.scale = base, scale

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        base = self.base or min(flat_inputs[0].shape[-2:])
        return {"side": max(1, round(base * float(torch.empty(()).uniform_(*self.scale))))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.resize, inpt, [params["side"]], antialias=True)


class BalancedCrop(v2.Transform):
    """A square window, drawn again while one class fills more than `most` of its labelled pixels, `tries` times.

    A picture that is smaller is padded at the right and bottom, in `fill`, its mask as not labelled.
    """

    def __init__(self, size: int, most: float = 0.75, tries: int = 10, fill: Sequence[float] = (124, 116, 104)):
        super().__init__()
        self.size, self.most, self.tries = size, most, tries
        self.fill = {tv_tensors.Image: list(fill), tv_tensors.Mask: IGNORE}

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        mask = next(item for item in flat_inputs if isinstance(item, tv_tensors.Mask))
        height, width = mask.shape[-2:]
        window = (0, 0)
        for _ in range(self.tries):
            window = tuple(int(torch.randint(max(0, side - self.size) + 1, ())) for side in (height, width))
            if self._varied(mask[..., window[0] : window[0] + self.size, window[1] : window[1] + self.size]):
                break
        bottom, right = max(0, self.size - height), max(0, self.size - width)
        return {"window": window, "padding": [0, 0, right, bottom]}

    def _varied(self, mask: Tensor) -> bool:
        counts = torch.bincount(mask.flatten(), minlength=256)[:IGNORE]
        return bool(counts.max() <= self.most * counts.sum()) and bool((counts > 0).sum() > 1)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        fill = self.fill[tv_tensors.Mask if isinstance(inpt, tv_tensors.Mask) else tv_tensors.Image]
        if any(params["padding"]):
            inpt = self._call_kernel(F.pad, inpt, padding=params["padding"], fill=fill)
        top, left = params["window"]
        return self._call_kernel(F.crop, inpt, top, left, self.size, self.size)


class Mirror(v2.Transform):
    """Left and right exchanged; a class whose name begins with "left-" becomes its counterpart."""

    def __init__(self, probability: float, mirrored: Sequence[int]):
        super().__init__()
        self.probability = probability
        self.table = torch.arange(256, dtype=torch.uint8)
        self.table[: len(mirrored)] = torch.tensor(list(mirrored), dtype=torch.uint8)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"on": bool(torch.rand(()) < self.probability)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not params["on"]:
            return inpt
        flipped = self._call_kernel(F.horizontal_flip, inpt)
        return tv_tensors.Mask(self.table[flipped.long()]) if isinstance(inpt, tv_tensors.Mask) else flipped


class TrainPair:
    """The transforms of training, one after the other."""

    def __init__(
        self,
        size: int,
        base: int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
        most: float = 0.75,
        flip: float = 0.5,
        distort: bool = True,
        mirrored: Sequence[int] = (),
        mean: Sequence[float] = (0.485, 0.456, 0.406),
    ):
        steps: list[Callable] = [
            RandomShorterSide(base, scale),
            BalancedCrop(size, most, fill=[round(255 * value) for value in mean]),
            Mirror(flip, mirrored),
        ]
        if distort:
            steps.append(
                v2.RandomPhotometricDistort(
                    brightness=(0.875, 1.125), contrast=(0.5, 1.5), saturation=(0.5, 1.5), hue=(-0.05, 0.05)
                )
            )
        self.steps = v2.Compose(steps)

    def __call__(self, image: Image.Image, mask: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels, labels = self.steps(tv_tensors.Image(image), tv_tensors.Mask(torch.from_numpy(mask)))
        return pixels.as_subclass(Tensor), labels.as_subclass(Tensor)


class PlainPair:
    """As they are: validation looks at the whole picture, in its own size."""

    def __call__(self, image: Image.Image, mask: np.ndarray) -> tuple[Tensor, Tensor]:
        return F.pil_to_tensor(image), torch.from_numpy(mask)
