"""One image and its mask -> uint8 tensors with the same geometric changes, using torchvision's transforms v2.

Resize the shorter side to a random multiple of a base size, crop where no class dominates, flip, and distort colours:
the augmentation in the segmentation recipes of all four papers.
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
    """Resize the shorter side to `base` (None: its own length) times a random factor."""

    def __init__(self, base: int | None, scale: tuple[float, float]):
        super().__init__()
        self.base, self.scale = base, scale

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        base = self.base or min(flat_inputs[0].shape[-2:])
        return {"side": max(1, round(base * float(torch.empty(()).uniform_(*self.scale))))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.resize, inpt, [params["side"]], antialias=True)


class BalancedCrop(v2.Transform):
    """Crop a square window, with `attempts` attempts to find one without a dominating class.

    A class dominates if it covers more than `max_class_fraction` of the labelled pixels. Smaller images are padded at
    the right and bottom with `fill`, their masks with IGNORE.
    """

    def __init__(
        self,
        size: int,
        max_class_fraction: float = 0.75,
        attempts: int = 10,
        fill: Sequence[float] = (124, 116, 104),
    ):
        super().__init__()
        self.size, self.max_class_fraction, self.attempts = size, max_class_fraction, attempts
        self.fill = {tv_tensors.Image: list(fill), tv_tensors.Mask: IGNORE}

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        mask = next(item for item in flat_inputs if isinstance(item, tv_tensors.Mask))
        height, width = mask.shape[-2:]
        top, left = 0, 0
        for _ in range(self.attempts):
            top, left = (int(torch.randint(max(0, side - self.size) + 1, ())) for side in (height, width))
            if self._is_balanced(mask[..., top : top + self.size, left : left + self.size]):
                break
        bottom, right = max(0, self.size - height), max(0, self.size - width)
        return {"corner": (top, left), "padding": [0, 0, right, bottom]}

    def _is_balanced(self, mask: Tensor) -> bool:
        counts = torch.bincount(mask.flatten(), minlength=256)[:IGNORE]
        return bool(counts.max() <= self.max_class_fraction * counts.sum()) and bool((counts > 0).sum() > 1)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        fill = self.fill[tv_tensors.Mask if isinstance(inpt, tv_tensors.Mask) else tv_tensors.Image]
        if any(params["padding"]):
            inpt = self._call_kernel(F.pad, inpt, padding=params["padding"], fill=fill)
        top, left = params["corner"]
        return self._call_kernel(F.crop, inpt, top, left, self.size, self.size)


class RandomClassFlip(v2.Transform):
    """Horizontal flip that replaces each class k in the mask by `flipped_classes[k]`: left arms become right arms."""

    def __init__(self, probability: float, flipped_classes: Sequence[int]):
        super().__init__()
        self.probability = probability
        self.table = torch.arange(256, dtype=torch.uint8)
        self.table[: len(flipped_classes)] = torch.tensor(list(flipped_classes), dtype=torch.uint8)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"flip": bool(torch.rand(()) < self.probability)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not params["flip"]:
            return inpt
        flipped = self._call_kernel(F.horizontal_flip, inpt)
        return tv_tensors.Mask(self.table[flipped.long()]) if isinstance(inpt, tv_tensors.Mask) else flipped


class TrainPair:
    """Training augmentation of an image and its mask.

    Args:
        size: side of the crop.
        base, scale: of `RandomShorterSide`. max_class_fraction: of `BalancedCrop`.
        flip: probability. flipped_classes: see `RandomClassFlip`.
        distort: random brightness, contrast, saturation and hue.
        mean: colour of the padding, in [0, 1].
    """

    def __init__(
        self,
        size: int,
        base: int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
        max_class_fraction: float = 0.75,
        flip: float = 0.5,
        distort: bool = True,
        flipped_classes: Sequence[int] = (),
        mean: Sequence[float] = (0.485, 0.456, 0.406),
    ):
        steps: list[Callable[..., Any]] = [
            RandomShorterSide(base, scale),
            BalancedCrop(size, max_class_fraction, fill=[round(255 * value) for value in mean]),
            RandomClassFlip(flip, flipped_classes),
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


class EvalPair:
    """Image and mask as tensors at their own size."""

    def __call__(self, image: Image.Image, mask: np.ndarray) -> tuple[Tensor, Tensor]:
        return F.pil_to_tensor(image), torch.from_numpy(mask)
