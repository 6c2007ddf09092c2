"""Augmentation of whole batches where they live, the GPU if there is one: for pictures small enough to stay there.

Every picture draws its own parameters; crop, flip, rotation, shear, translation and resizing are one affine map and
are sampled once. The operations are RandAugment's (arXiv 1909.13719) and TrivialAugment's (arXiv 2103.10158).
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GEOMETRY = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


class Policy(NamedTuple):
    """How many operations a picture gets, and how strong."""

    rounds: int
    strength: float | None  # 0 to 1; None draws it anew for every picture (TrivialAugment)
    spread: float = 0.0  # standard deviation of the strength

    @classmethod
    def parse(cls, text: str) -> "Policy | None":
        """ "" is none, "trivial" TrivialAugment, "rand-m9-n2-mstd0.5" RandAugment in timm's spelling."""
        if not text:
            return None
        if text == "trivial":
            return cls(1, None)
        if not re.fullmatch(r"rand(-[a-z]+[\d.]*)*", text):
            raise ValueError(
                f"augment.auto={text!r} cannot run on batches in memory: use 'trivial', 'rand-m9-n2' or ''."
            )
        found = dict(re.findall(r"-([a-z]+)([\d.]+)", text))
        return cls(int(found.get("n", 2)), float(found.get("m", 10)) / 10, float(found.get("mstd", 0)) / 10)


class BatchAugment:
    """uint8 pictures (B, 3, h, w) -> normalised float pictures (B, 3, size, size), each changed in its own way."""

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

    def __call__(self, images: Tensor, dice: torch.Generator) -> Tensor:
        return self.change(images, self.throw(images.shape[0], images.device, dice))

    def throw(self, batch: int, device: torch.device, dice: torch.Generator) -> list[Tensor]:
        """Every random number of a batch: the window's (5, B), the jitter's (3, B), then of each round what and how."""
        draws = [torch.rand(5, batch, device=device, generator=dice)]
        draws.append(torch.rand(3 if self.jitter else 0, batch, device=device, generator=dice))
        for _ in range(self.policy.rounds if self.policy else 0):
            draws.append(torch.randint(len(OPERATIONS), (batch,), device=device, generator=dice))
            draws.append(self._strength(batch, device, dice))
        return draws

    def change(self, images: Tensor, draws: list[Tensor]) -> Tensor:
        """What the draws say; without a die in it, so that it can be compiled."""
        pixels = images.float() / 255
        window = self._window(draws[0], images.shape[3])  # (B, 3, 3)
        for operation, draw in zip(("brightness", "contrast", "saturation"), draws[1], strict=False):
            pixels = blend(pixels, operation, 1 + self.jitter * (2 * draw - 1))
        for chosen, strength in zip(draws[2::2], draws[3::2], strict=True):
            pixels = recolour(pixels, chosen, strength)
            window = window @ warp(chosen, strength)
        return sample(normalise(pixels, self.mean, self.std), window, self.size)

    def _strength(self, batch: int, device: torch.device, dice: torch.Generator) -> Tensor:
        """(B,) in [-1, 1]; the sign chooses the direction where an operation has two."""
        assert self.policy is not None
        sign = torch.randint(2, (batch,), device=device, generator=dice) * 2.0 - 1
        if self.policy.strength is None:
            return sign * torch.rand(batch, device=device, generator=dice)
        spread = self.policy.spread * torch.randn(batch, device=device, generator=dice)
        return sign * (self.policy.strength + spread).clamp(0, 1)

    def _window(self, draw: Tensor, side: int) -> Tensor:
        """(B, 3, 3): where in the picture, from -1 to 1, the corners of the output lie."""
        if self.crop == "resized":
            area = self.scale[0] + draw[0] * (self.scale[1] - self.scale[0])
            low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
            aspect = (low + draw[1] * (high - low)).exp()
            width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
            x, y = (2 * draw[2] - 1) * (1 - width), (2 * draw[3] - 1) * (1 - height)
        else:
            reach = round(self.pad * side) if self.crop == "pad" else 0
            width = height = torch.ones_like(draw[0])
            x, y = ((draw[i] * (2 * reach + 1)).floor() - reach for i in (2, 3))  # whole pixels
            x, y = 2 * x / side, 2 * y / side
        mirror = torch.where(draw[4] < self.flip, -1.0, 1.0)
        return affine(mirror * width, 0.0, x, 0.0, height, y)


def affine(*entries: Tensor | float) -> Tensor:
    """The six upper entries of a map, (B,) or numbers, row by row -> (B, 3, 3)."""
    batch = next(entry for entry in entries if isinstance(entry, Tensor))
    rows = [
        entry if isinstance(entry, Tensor) else torch.full_like(batch, entry) for entry in (*entries, 0.0, 0.0, 1.0)
    ]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def warp(chosen: Tensor, strength: Tensor) -> Tensor:
    """(B, 3, 3): the geometric operation of every picture, the identity where another kind was chosen."""
    zero = torch.zeros_like(strength)

    def of(operation: str, reach: float) -> Tensor:
        return torch.where(chosen == OPERATIONS.index(operation), reach * strength, zero)

    angle = of("rotate", math.radians(30))
    shear_x, shear_y = of("shear_x", 0.3), of("shear_y", 0.3)
    turn = affine(angle.cos(), -angle.sin(), of("translate_x", 0.9), angle.sin(), angle.cos(), of("translate_y", 0.9))
    return turn @ affine(1.0 + zero, shear_x, zero, shear_y, 1.0 + zero, zero)


def sample(pixels: Tensor, window: Tensor, size: int) -> Tensor:
    """Read every picture through its window; beyond the edge lies zero, the mean colour."""
    grid = F.affine_grid(window[:, :2], [pixels.shape[0], pixels.shape[1], size, size], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def normalise(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Pixels from 0 to 1 -> what the model was made for: pictures (…, 3, H, W), or clips, which have time behind it."""
    axis = -3 if pixels.ndim <= 4 else -4
    channels = zip(pixels.unbind(axis), mean, std, strict=True)
    return torch.stack([(channel - offset) / scale for channel, offset, scale in channels], axis)


def resize(pixels: Tensor, size: int) -> Tensor:
    """Square pictures to another side, smoothly."""
    if pixels.shape[-1] == size:
        return pixels
    if pixels.ndim > 4:  # clips: frame by frame
        return resize(pixels.flatten(0, -3)[:, None], size).view(*pixels.shape[:-2], size, size)
    return F.interpolate(pixels, (size, size), mode="bicubic", antialias=True, align_corners=False)


def recolour(pixels: Tensor, chosen: Tensor, strength: Tensor) -> Tensor:
    """Apply to every picture the colour operation chosen for it, none if it is of another kind."""
    for operation, change in CHANGES.items():
        mine = chosen == OPERATIONS.index(operation)
        if pixels.device.type != "cpu" or torch.compiler.is_compiling():  # all, then choose: nobody waits for a count
            pixels = torch.where(mine[:, None, None, None], change(pixels, strength), pixels)
        elif mine.any():
            pixels = pixels.index_copy(0, mine.nonzero()[:, 0], change(pixels[mine], strength[mine]))
    return pixels


def blend(pixels: Tensor, operation: str, factor: Tensor) -> Tensor:
    """Move away from (factor > 1) or towards (factor < 1) a picture without the property; factor (B,)."""
    red, green, blue = pixels.split(1, dim=1)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    if operation == "brightness":
        without = torch.zeros_like(grey)
    elif operation == "contrast":
        without = grey.mean((2, 3), keepdim=True)
    elif operation == "saturation":
        without = grey
    else:
        without = F.avg_pool2d(pixels, 3, stride=1, padding=1, count_include_pad=False)
    return (without + factor[:, None, None, None] * (pixels - without)).clamp(0, 1)


def equalise(pixels: Tensor) -> Tensor:
    """Every value becomes the share of its channel's pixels that are not brighter, in 256 steps of brightness."""
    levels = (pixels.flatten(2) * 255).round().long()  # (B, 3, h * w)
    counts = pixels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(pixels.flatten(2)))
    return (counts.cumsum(-1) / levels.shape[-1]).gather(2, levels).view_as(pixels)


def posterize(pixels: Tensor, strength: Tensor) -> Tensor:
    step = 2 ** (4 * strength.abs()).round()[:, None, None, None]  # keeps 8 to 4 bits
    return (pixels * 255 / step).floor() * step / 255


def solarize(pixels: Tensor, strength: Tensor) -> Tensor:
    return torch.where(pixels >= 1 - strength.abs()[:, None, None, None], 1 - pixels, pixels)


def stretch(pixels: Tensor) -> Tensor:
    """Every channel from 0 to 1."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return (pixels - low) / (high - low).clamp(min=1 / 255)


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda pixels, strength: blend(pixels, "brightness", 1 + 0.9 * strength),
    "contrast": lambda pixels, strength: blend(pixels, "contrast", 1 + 0.9 * strength),
    "saturation": lambda pixels, strength: blend(pixels, "saturation", 1 + 0.9 * strength),
    "sharpness": lambda pixels, strength: blend(pixels, "sharpness", 1 + 0.9 * strength),
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": lambda pixels, strength: stretch(pixels),
    "equalize": lambda pixels, strength: equalise(pixels),
}
OPERATIONS = ("identity", *GEOMETRY, *CHANGES)


def erase(images: Tensor, probability: float, dice: torch.Generator) -> Tensor:
    """Random erasing (arXiv 1708.04896) of normalised pictures: a rectangle of noise in some of them."""
    batch, _, height, width = images.shape
    draw = torch.rand(5, batch, device=images.device, generator=dice)
    area = 0.02 + draw[0] * (1 / 3 - 0.02)
    aspect = (math.log(0.3) + draw[1] * (math.log(1 / 0.3) - math.log(0.3))).exp()
    tall, wide = ((area * aspect).sqrt() * height).clamp(max=height), ((area / aspect).sqrt() * width).clamp(max=width)
    top, left = draw[2] * (height - tall), draw[3] * (width - wide)
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)[None, :]
    top, left, tall, wide = (value[:, None, None] for value in (top, left, tall, wide))
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)  # (B, H, W)
    inside &= (draw[4] < probability)[:, None, None]
    noise = torch.randn(images.shape, device=images.device, dtype=images.dtype, generator=dice)
    return torch.where(inside[:, None], noise, images)
