"""One RGB image -> uint8 tensor (3, S, S), augmented by timm and torchvision. Normalization follows on the device."""

from collections.abc import Callable
from typing import Any, cast

from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
from torch import Tensor
from torchvision import transforms as tv
from torchvision.transforms.functional import InterpolationMode

from saccade._errors import UsageError

ImageTransform = Callable[[Image.Image], Tensor]


def eval_transform(size: int, crop_pct: float = 1.0, interpolation: str = "bicubic") -> ImageTransform:
    """Resize the shorter side to size / crop_pct, then crop the centre: the evaluation protocol of the papers."""
    transform = create_transform(
        size, is_training=False, interpolation=interpolation, crop_pct=crop_pct, normalize=False
    )
    return cast(ImageTransform, transform)  # timm returns a tuple only for `separate=True`


def train_transform(
    size: int,
    crop: str = "resized",
    pad: float = 0.125,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    jitter: float = 0.0,
    auto_augment: str = "",
    interpolation: str = "bicubic",
    mean: tuple[float, ...] = (0.485, 0.456, 0.406),
) -> ImageTransform:
    """Random crop, flip, then colour jitter or an `auto_augment` policy, which disables the jitter as in timm.

    Policies: "" (none), "trivial", or timm's "rand-...", "original", "v0", ...
    """
    mode = InterpolationMode(interpolation)
    steps: list[Callable[..., Any]] = [tv.Resize(size, mode), tv.CenterCrop(size)]
    if crop == "resized":
        steps = [tv.RandomResizedCrop(size, scale, ratio, mode)]
    elif crop == "pad":
        fill: Any = tuple(round(255 * value) for value in mean)  # torchvision annotates it as a number only
        steps.append(tv.RandomCrop(size, padding=round(pad * size), fill=fill))
    steps.append(tv.RandomHorizontalFlip(flip))
    if auto_augment == "trivial":
        steps.append(tv.TrivialAugmentWide(interpolation=mode))
    elif auto_augment:
        hparams = {"translate_const": int(size * 0.45), "img_mean": tuple(min(255, round(255 * x)) for x in mean)}
        create = rand_augment_transform if auto_augment.startswith("rand") else auto_augment_transform
        try:
            steps.append(create(auto_augment, hparams))
        except AssertionError as error:
            raise UsageError(f"expected trivial or a policy of timm as auto_augment, got {auto_augment!r}.") from error
    elif jitter:
        steps.append(tv.ColorJitter(jitter, jitter, jitter))
    return tv.Compose([*steps, tv.PILToTensor()])


class MemoryTransform:
    """Resize and centre-crop images to squares for caching; augmentation follows per batch."""

    def __init__(self, size: int, interpolation: str = "bicubic"):
        self.size = size
        self.resize = tv.Compose([tv.Resize(size, InterpolationMode(interpolation)), tv.CenterCrop(size)])
        self.to_tensor = tv.PILToTensor()

    def __call__(self, image: Image.Image) -> Tensor:
        return self.to_tensor(image if image.size == (self.size, self.size) else self.resize(image))
