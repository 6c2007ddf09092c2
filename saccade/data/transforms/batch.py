"""Augmentation of whole batches on their device, for images that are small enough to be cached there.

Every image has its own parameters. Crop, flip, rotation, shear, translation and resizing are combined into one affine
map and sampled once. The operations are those of RandAugment (arXiv 1909.13719) and TrivialAugment (arXiv 2103.10158).
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from torch import Tensor

from saccade._errors import UsageError

GEOMETRIC_OPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


class Policy(NamedTuple):
    """Number and magnitude of random operations per image."""

    num_ops: int
    magnitude: float | None  # 0 to 1; None samples it per image (TrivialAugment)
    magnitude_std: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Policy | None":
        """ "" is None, "trivial" is TrivialAugment, "rand-m9-n2-mstd0.5" is RandAugment in timm's notation."""
        if not text:
            return None
        if text == "trivial":
            return cls(1, None)
        if not re.fullmatch(r"rand(-[a-z]+[\d.]*)*", text):
            raise UsageError(
                f"expected 'trivial', 'rand-m9-n2' or '' as the policy for cached images, got {text!r}. "
                "Other policies need data.cache=false."
            )
        options = dict(re.findall(r"-([a-z]+)([\d.]+)", text))
        return cls(int(options.get("n", 2)), float(options.get("m", 10)) / 10, float(options.get("mstd", 0)) / 10)


class BatchAugment:
    """uint8 images (B, 3, h, w) -> augmented, normalized float images (B, 3, size, size).

    Args:
        crop: "pad" shifts by up to `pad` of the side, in whole pixels; "resized" samples area and aspect ratio; "none".
        jitter: strength of random brightness, contrast and saturation.
    """

    def __init__(
        self,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop: str = "pad",
        pad: float = 0.125,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        jitter: float = 0.0,
        policy: Policy | None = None,
    ):
        self.size, self.mean, self.std = size, mean, std
        self.crop, self.pad, self.scale, self.ratio = crop, pad, scale, ratio
        self.flip, self.jitter, self.policy = flip, jitter, policy

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.apply(images, self.sample_parameters(images.shape[0], images.device, generator))

    def sample_parameters(self, batch: int, device: torch.device, generator: torch.Generator) -> list[Tensor]:
        """Random numbers of a batch: (5, B) for the window, (3, B) for jitter, then op and magnitude per operation."""
        parameters = [torch.rand(5, batch, device=device, generator=generator)]
        parameters.append(torch.rand(3 if self.jitter else 0, batch, device=device, generator=generator))
        for _ in range(self.policy.num_ops if self.policy else 0):
            parameters.append(torch.randint(len(OPS), (batch,), device=device, generator=generator))
            parameters.append(self._sample_magnitude(batch, device, generator))
        return parameters

    def apply(self, images: Tensor, parameters: list[Tensor]) -> Tensor:
        """The deterministic part, which torch.compile can capture."""
        pixels = images.float() / 255
        window = self._crop_window(parameters[0], images.shape[3])  # (B, 3, 3)
        for name, uniform in zip(("brightness", "contrast", "saturation"), parameters[1], strict=False):
            pixels = blend(pixels, name, 1 + self.jitter * (2 * uniform - 1))
        for op, magnitude in zip(parameters[2::2], parameters[3::2], strict=True):
            pixels = apply_colour_ops(pixels, op, magnitude)
            window = window @ geometric_map(op, magnitude)
        return sample_bilinear(normalize(pixels, self.mean, self.std), window_grid(window, self.size))

    def _sample_magnitude(self, batch: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """(B,) in [-1, 1]; the sign selects the direction of operations that have two."""
        assert self.policy is not None
        sign = torch.randint(2, (batch,), device=device, generator=generator) * 2.0 - 1
        if self.policy.magnitude is None:
            return sign * torch.rand(batch, device=device, generator=generator)
        noise = self.policy.magnitude_std * torch.randn(batch, device=device, generator=generator)
        return sign * (self.policy.magnitude + noise).clamp(0, 1)

    def _crop_window(self, uniform: Tensor, side: int) -> Tensor:
        """(B, 3, 3): map from output coordinates in [-1, 1] to input coordinates in [-1, 1]."""
        if self.crop == "resized":
            area = self.scale[0] + uniform[0] * (self.scale[1] - self.scale[0])
            low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
            aspect = (low + uniform[1] * (high - low)).exp()
            width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
            x, y = (2 * uniform[2] - 1) * (1 - width), (2 * uniform[3] - 1) * (1 - height)
        else:
            padding = round(self.pad * side) if self.crop == "pad" else 0
            width = height = torch.ones_like(uniform[0])
            x, y = ((uniform[i] * (2 * padding + 1)).floor() - padding for i in (2, 3))  # in pixels
            x, y = 2 * x / side, 2 * y / side
        sign = torch.where(uniform[4] < self.flip, -1.0, 1.0)
        return affine(sign * width, 0.0, x, 0.0, height, y)


def affine(*entries: Tensor | float) -> Tensor:
    """The two upper rows of affine maps, as six (B,) tensors or numbers -> (B, 3, 3)."""
    template = next(entry for entry in entries if isinstance(entry, Tensor))
    rows = [
        entry if isinstance(entry, Tensor) else torch.full_like(template, entry) for entry in (*entries, 0.0, 0.0, 1.0)
    ]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def geometric_map(op: Tensor, magnitude: Tensor) -> Tensor:
    """op (B,), magnitude (B,) -> (B, 3, 3): the geometric operation of each image, identity for other operations."""
    zero = torch.zeros_like(magnitude)

    def amount(name: str, maximum: float) -> Tensor:
        return torch.where(op == OPS.index(name), maximum * magnitude, zero)

    angle = amount("rotate", math.radians(30))
    x, y = amount("translate_x", 0.9), amount("translate_y", 0.9)
    rigid = affine(angle.cos(), -angle.sin(), x, angle.sin(), angle.cos(), y)
    return rigid @ affine(1.0 + zero, amount("shear_x", 0.3), zero, amount("shear_y", 0.3), 1.0 + zero, zero)


def window_grid(window: Tensor, size: int) -> Tensor:
    """Affine maps (B, 3, 3) -> sampling points (B, size, size, 2) for `grid_sample`."""
    return F.affine_grid(window[:, :2], [window.shape[0], 1, size, size], align_corners=False)


def sample_bilinear(pixels: Tensor, grid: Tensor) -> Tensor:
    """pixels (B, C, h, w) at points (B, H, W, 2) -> (B, C, H, W); zero outside the image."""
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pixels - mean) / std per channel, for images (..., 3, H, W) or clips (B, 3, T, H, W) in [0, 1].

    With one mean the colour channels are averaged first, for models with one input channel.
    """
    axis = -3 if pixels.ndim <= 4 else -4
    if len(mean) == 1:
        pixels = pixels.mean(axis, keepdim=True)
    channels = zip(pixels.unbind(axis), mean, std, strict=True)
    return torch.stack([(channel - offset) / scale for channel, offset, scale in channels], axis)


def resize(pixels: Tensor, size: int) -> Tensor:
    """Resize square images or clips to `size`, bicubic with antialiasing."""
    if pixels.shape[-1] == size:
        return pixels
    if pixels.ndim > 4:  # clips: frame by frame
        return resize(pixels.flatten(0, -3)[:, None], size).view(*pixels.shape[:-2], size, size)
    return F.interpolate(pixels, (size, size), mode="bicubic", antialias=True, align_corners=False)


def apply_colour_ops(pixels: Tensor, op: Tensor, magnitude: Tensor) -> Tensor:
    """Apply the colour operation `op` (B,) of each image; other operations leave it unchanged."""
    for name, function in COLOUR_OPS.items():
        selected = op == OPS.index(name)
        if pixels.device.type != "cpu" or torch.compiler.is_compiling():
            # Compute all images and select: indexing by a mask would synchronise with the GPU.
            pixels = torch.where(selected[:, None, None, None], function(pixels, magnitude), pixels)
        elif selected.any():
            changed = function(pixels[selected], magnitude[selected])
            pixels = pixels.index_copy(0, selected.nonzero()[:, 0], changed)
    return pixels


def blend(pixels: Tensor, name: str, factor: Tensor) -> Tensor:
    """Extrapolate (factor > 1) or interpolate (factor < 1) from an image without the property; factor (B,)."""
    red, green, blue = pixels.split(1, dim=1)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    if name == "brightness":
        degenerate = torch.zeros_like(grey)
    elif name == "contrast":
        degenerate = grey.mean((2, 3), keepdim=True)
    elif name == "saturation":
        degenerate = grey
    else:  # sharpness
        degenerate = F.avg_pool2d(pixels, 3, stride=1, padding=1, count_include_pad=False)
    return (degenerate + factor[:, None, None, None] * (pixels - degenerate)).clamp(0, 1)


def equalize(pixels: Tensor) -> Tensor:
    """Histogram equalization with 256 levels: each value becomes the fraction of its channel that is not larger."""
    levels = (pixels.flatten(2) * 255).round().long()  # (B, 3, h * w)
    counts = pixels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(pixels.flatten(2)))
    return (counts.cumsum(-1) / levels.shape[-1]).gather(2, levels).view_as(pixels)


def posterize(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """Reduce to 8 (magnitude 0) ... 4 bits (magnitude 1)."""
    step = 2 ** (4 * magnitude.abs()).round()[:, None, None, None]
    return (pixels * 255 / step).floor() * step / 255


def solarize(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """Invert values above 1 - magnitude."""
    return torch.where(pixels >= 1 - magnitude.abs()[:, None, None, None], 1 - pixels, pixels)


def autocontrast(pixels: Tensor) -> Tensor:
    """Scale each channel to [0, 1]."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return (pixels - low) / (high - low).clamp(min=1 / 255)


COLOUR_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda pixels, magnitude: blend(pixels, "brightness", 1 + 0.9 * magnitude),
    "contrast": lambda pixels, magnitude: blend(pixels, "contrast", 1 + 0.9 * magnitude),
    "saturation": lambda pixels, magnitude: blend(pixels, "saturation", 1 + 0.9 * magnitude),
    "sharpness": lambda pixels, magnitude: blend(pixels, "sharpness", 1 + 0.9 * magnitude),
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": lambda pixels, magnitude: autocontrast(pixels),
    "equalize": lambda pixels, magnitude: equalize(pixels),
}
OPS = ("identity", *GEOMETRIC_OPS, *COLOUR_OPS)


class MultiHotMixup(Mixup):
    """timm's mixup and cutmix of batches for multi-hot targets (B, K), which are mixed in the same ratio."""

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        ratio = self._mix_batch(x)
        return x, ratio * target + (1 - ratio) * target.flip(0)


def random_erase(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Random erasing (arXiv 1708.04896): fill a rectangle of some normalized images with noise."""
    batch, _, height, width = images.shape
    uniform = torch.rand(5, batch, device=images.device, generator=generator)
    area = 0.02 + uniform[0] * (1 / 3 - 0.02)
    aspect = (math.log(0.3) + uniform[1] * (math.log(1 / 0.3) - math.log(0.3))).exp()
    box_height = ((area * aspect).sqrt() * height).clamp(max=height)
    box_width = ((area / aspect).sqrt() * width).clamp(max=width)
    top, left = uniform[2] * (height - box_height), uniform[3] * (width - box_width)
    top, left, box_height, box_width = (value[:, None, None] for value in (top, left, box_height, box_width))
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)[None, :]
    inside = (rows >= top) & (rows < top + box_height) & (columns >= left) & (columns < left + box_width)  # (B, H, W)
    inside &= (uniform[4] < probability)[:, None, None]
    noise = torch.randn(images.shape, device=images.device, dtype=images.dtype, generator=generator)
    return torch.where(inside[:, None], noise, images)
