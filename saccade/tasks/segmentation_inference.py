"""From logits to answers: the whole image, a sliding window, several scales and mirrored. No seams, any size."""

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SegmentationModel = Callable[[Tensor], Tensor]  # images (B, 3, h, w) -> logits (B, K, h, w)
GRID = 32  # windows start at multiples of this, so that a network of strides meets the same pixels in each


class InferenceOptions(NamedTuple):
    """How a segmenter is asked.

    `window` 0 takes the whole image at once; otherwise a window of that side slides by `stride` (2/3 of it if 0).
    `scales` and `flip` ask again about resized and mirrored images and average the probabilities ("MS mIoU").
    """

    window: int = 0
    stride: int = 0
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False


WHOLE_IMAGE = InferenceOptions()
MULTI_SCALE_FLIP = InferenceOptions(scales=(0.5, 0.75, 1.0, 1.25, 1.5, 1.75), flip=True)  # SVIT-53


def predict_probabilities(
    model: SegmentationModel, images: Tensor, how: InferenceOptions = WHOLE_IMAGE, mirrored: Sequence[int] = ()
) -> Tensor:
    """images (B, 3, H, W) -> probabilities (B, K, H, W); `mirrored` has each class's counterpart in a mirror."""
    total, count = None, 0
    for view, restore in augmented_views(images, how.scales, how.flip, mirrored):
        logits = slide_window(model, view, how.window, how.stride) if how.window else model(view)
        shares = restore(logits.float().softmax(1))
        total = shares if total is None else total + shares
        count += 1
    if total is None:
        raise ValueError("no scale was given: expected scales such as (1.0,) or (0.5, 1.0, 1.5).")
    return total / count


def augmented_views(
    images: Tensor, scales: Sequence[float], flip: bool, mirrored: Sequence[int] = ()
) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """The image in every size, and mirrored; with each, the way back to the image's own pixels."""
    height, width = images.shape[2:]
    for scale in scales:
        size = (max(GRID, round(height * scale)), max(GRID, round(width * scale)))
        view = images if scale == 1 else F.interpolate(images, size, mode="bilinear", antialias=True)

        def restore(shares: Tensor) -> Tensor:
            if shares.shape[2:] == (height, width):
                return shares
            return F.interpolate(shares, (height, width), mode="bilinear", align_corners=False)

        yield view, restore
        if flip:
            swap = list(mirrored) if list(mirrored) != list(range(len(mirrored))) else slice(None)
            yield view.flip(3), lambda shares, restore=restore, swap=swap: restore(shares.flip(3)[:, swap])


def predict_labels(
    model: SegmentationModel, images: Tensor, how: InferenceOptions = WHOLE_IMAGE, mirrored: Sequence[int] = ()
) -> Tensor:
    """images (B, 3, H, W) -> the class of every pixel (B, H, W); a large photo band by band, in little memory."""
    if how.window and tuple(how.scales) == (1.0,) and not how.flip:
        return torch.cat([logits.argmax(1) for logits in window_bands(model, images, how.window, how.stride)], dim=1)
    return predict_probabilities(model, images, how, mirrored).argmax(1)


def slide_window(
    model: SegmentationModel, images: Tensor, window: int, stride: int = 0, margin: int | None = None, batch: int = 8
) -> Tensor:
    """Logits (B, K, H, W) from overlapping windows, blended so that no window's edge shows.

    A network knows least about the edge of what it is shown. So the outermost `margin` pixels of a window count for
    nothing (unless the image ends there), and over the rest of the overlap one window fades into the next. Where no
    prediction depends on pixels farther off than the margin, the result is that of the whole image.
    """
    return torch.cat(list(window_bands(model, images, window, stride, margin, batch)), dim=2)


def window_bands(
    model: SegmentationModel, images: Tensor, window: int, stride: int = 0, margin: int | None = None, batch: int = 8
) -> Iterator[Tensor]:
    """The same from top to bottom, in window_bands (B, K, rows, W) that no later window changes."""
    stride = stride or max(GRID, window * 2 // 3 // GRID * GRID)
    if window < GRID or not 0 < stride <= window:
        raise ValueError(
            f"expected a window of at least {GRID} px and a stride up to its side; got {window}, {stride}."
        )
    overlap = window - stride
    margin = overlap // 4 if margin is None else margin
    if 2 * margin > overlap:
        raise ValueError(f"windows overlap by {overlap} px: a margin of {margin} leaves nothing between them.")
    height, width = images.shape[2:]
    downs, acrosses = window_spans(height, window, stride), window_spans(width, window, stride)
    left_over: tuple[Tensor, Tensor] | None = None  # sums and weights of rows that the next windows see as well
    for row, (top, bottom) in enumerate(downs):
        weight = images.new_zeros(bottom - top, width, dtype=torch.float32)
        total = None
        fade_down = window_weights(top, bottom, height, overlap, margin, images.device)[:, None]
        for group in _group_by_width(acrosses, max(1, batch // images.shape[0])):
            parts = torch.cat([images[:, :, top:bottom, left:right] for left, right in group])
            for (left, right), logits in zip(group, model(parts).float().chunk(len(group)), strict=True):
                share = fade_down * window_weights(left, right, width, overlap, margin, images.device)
                if total is None:
                    total = logits.new_zeros(images.shape[0], logits.shape[1], bottom - top, width)
                total[:, :, :, left:right] += share * logits
                weight[:, left:right] += share
        assert total is not None
        if left_over is not None:
            rows = left_over[1].shape[0]
            total[:, :, :rows] += left_over[0]
            weight[:rows] += left_over[1]
        done = (downs[row + 1][0] if row + 1 < len(downs) else height) - top
        yield total[:, :, :done] / weight[:done]
        left_over = total[:, :, done:], weight[done:]


def window_spans(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Where windows begin and end along one side: equal steps, the last one cut where the image ends."""
    if length <= window:
        return [(0, length)]
    steps, grid = -(-(length - window) // stride), gcd(stride, GRID)
    last = -(-(length - window) // grid) * grid  # the first start from which a window reaches the end
    return [(start, min(start + window, length)) for start in (*range(0, steps * stride, stride), last)]


def window_weights(start: int, end: int, length: int, overlap: int, margin: int, device: torch.device) -> Tensor:
    """Weights (end - start,): 0 in the margin, rising to 1 over the overlap, and 1 up to the image's own edges."""
    place = torch.arange(end - start, device=device) + 0.5
    weights = torch.ones(end - start, device=device)
    ramp = max(overlap - 2 * margin, 1)
    if start > 0:
        weights = weights * ((place - margin) / ramp).clamp(0, 1)
    if end < length:
        weights = weights * ((end - start - place - margin) / ramp).clamp(0, 1)
    return weights


def _group_by_width(acrosses: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Neighbouring windows of one width, at most so many at a time."""
    group: list[tuple[int, int]] = []
    for span in acrosses:
        if group and (len(group) == most or span[1] - span[0] != group[0][1] - group[0][0]):
            yield group
            group = []
        group.append(span)
    yield group
