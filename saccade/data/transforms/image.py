"""One RGB picture -> uint8 tensor (3, S, S), with the augmentation of timm and torchvision; normalising comes later."""

from collections.abc import Callable

from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
from torch import Tensor
from torchvision import transforms as tv
from torchvision.transforms.functional import InterpolationMode

Transform = Callable[[Image.Image], Tensor]


def eval_transform(size: int, crop_pct: float = 1.0, interpolation: str = "bicubic") -> Transform:
    """The papers' protocol: shorter side to size / crop_pct, centre crop."""
    return create_transform(  # type: ignore[return-value]
        size, is_training=False, interpolation=interpolation, crop_pct=crop_pct, normalize=False
    )


def train_transform(
    size: int,
    crop: str = "resized",
    pad: float = 0.125,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    jitter: float = 0.0,
    auto: str = "",
    interpolation: str = "bicubic",
    mean: tuple[float, ...] = (0.485, 0.456, 0.406),
) -> Transform:
    """Random crop, flip, then `auto`: "" | "trivial" | timm's "rand-…" or "original", "v0", …

    As in timm, colour jitter rests while an automatic policy is on.
    """
    how = InterpolationMode(interpolation)
    if crop == "resized":
        steps: list[Callable] = [tv.RandomResizedCrop(size, scale, ratio, how)]
    else:
        steps = [tv.Resize(size, how), tv.CenterCrop(size)]
        if crop == "pad":
            fill = tuple(round(255 * value) for value in mean)
            steps.append(tv.RandomCrop(size, padding=round(pad * size), fill=fill))  # type: ignore[arg-type]
    steps.append(tv.RandomHorizontalFlip(flip))
    if auto == "trivial":
        steps.append(tv.TrivialAugmentWide(interpolation=how))
    elif auto:
        hints = {"translate_const": int(size * 0.45), "img_mean": tuple(min(255, round(255 * x)) for x in mean)}
        make = rand_augment_transform if auto.startswith("rand") else auto_augment_transform
        steps.append(make(auto, hints))
    elif jitter:
        steps.append(tv.ColorJitter(jitter, jitter, jitter))
    return tv.Compose([*steps, tv.PILToTensor()])


class MemoryTransform:
    """What pictures kept in memory look like: the whole shorter side, square, no augmentation yet."""

    def __init__(self, size: int, interpolation: str = "bicubic"):
        self.size = size
        self.fit = tv.Compose([tv.Resize(size, InterpolationMode(interpolation)), tv.CenterCrop(size)])
        self.to_tensor = tv.PILToTensor()

    def __call__(self, image: Image.Image) -> Tensor:
        return self.to_tensor(image if image.size == (self.size, self.size) else self.fit(image))
