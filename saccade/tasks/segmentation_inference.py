"""Segmentation inference on images of any size: whole image, sliding window, multi-scale, flip."""

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade._errors import UsageError

SegmentationModel = Callable[[Tensor], Tensor]  # images (B, 3, h, w) -> logits (B, K, h, w)
GRID = 32  # windows start at multiples of the largest stride, so that strided networks align across windows


class InferenceOptions(NamedTuple):
    """How a segmenter is applied to an image.

    `window` is the side of a sliding window, 0 for the whole image; `stride` its step, 0 for 2/3 of the window.
    `scales` and `flip` average the probabilities over resized and mirrored images ("MS mIoU").
    """

    window: int = 0
    stride: int = 0
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False


WHOLE_IMAGE = InferenceOptions()
MULTI_SCALE_FLIP = InferenceOptions(scales=(0.5, 0.75, 1.0, 1.25, 1.5, 1.75), flip=True)  # SViT Sec. 4.3


def predict_probabilities(
    model: SegmentationModel,
    images: Tensor,
    options: InferenceOptions = WHOLE_IMAGE,
    flipped_classes: Sequence[int] = (),
) -> Tensor:
    """images (B, 3, H, W) -> probabilities (B, K, H, W). Class k becomes `flipped_classes[k]` in a mirrored image."""
    total, count = None, 0
    for view, restore in augmented_views(images, options.scales, options.flip, flipped_classes):
        logits = slide_window(model, view, options.window, options.stride) if options.window else model(view)
        probabilities = restore(logits.float().softmax(1))
        total = probabilities if total is None else total + probabilities
        count += 1
    if total is None:
        raise UsageError("expected at least one scale, got none. Pass scales such as (1.0,) or (0.5, 1.0, 1.5).")
    return total / count


def augmented_views(
    images: Tensor, scales: Sequence[float], flip: bool, flipped_classes: Sequence[int] = ()
) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Resized and mirrored images, each with the function that maps its probabilities back to the input's pixels."""
    height, width = images.shape[2:]
    for scale in scales:
        size = (max(GRID, round(height * scale)), max(GRID, round(width * scale)))
        view = images if scale == 1 else F.interpolate(images, size, mode="bilinear", antialias=True)

        def restore(probabilities: Tensor) -> Tensor:
            if probabilities.shape[2:] == (height, width):
                return probabilities
            return F.interpolate(probabilities, (height, width), mode="bilinear", align_corners=False)

        yield view, restore
        if flip:
            swap = list(flipped_classes) if list(flipped_classes) != list(range(len(flipped_classes))) else slice(None)
            yield view.flip(3), lambda mirror, restore=restore, swap=swap: restore(mirror.flip(3)[:, swap])


def predict_labels(
    model: SegmentationModel,
    images: Tensor,
    options: InferenceOptions = WHOLE_IMAGE,
    flipped_classes: Sequence[int] = (),
) -> Tensor:
    """images (B, 3, H, W) -> class of every pixel (B, H, W).

    With a sliding window at one scale, the argmax is taken per band, so that the logits of a large image need not fit
    in memory.
    """
    if options.window and tuple(options.scales) == (1.0,) and not options.flip:
        bands = window_bands(model, images, options.window, options.stride)
        return torch.cat([logits.argmax(1) for logits in bands], dim=1)
    return predict_probabilities(model, images, options, flipped_classes).argmax(1)


def slide_window(
    model: SegmentationModel, images: Tensor, window: int, stride: int = 0, margin: int | None = None, batch: int = 8
) -> Tensor:
    """Logits (B, K, H, W) from overlapping windows, blended without seams.

    Predictions are least reliable at a window's edge: the outermost `margin` pixels have weight 0 (except at the
    image's edge), and weights rise linearly over the rest of the overlap. If no prediction depends on pixels farther
    away than the margin, the result equals that of the whole image.
    """
    return torch.cat(list(window_bands(model, images, window, stride, margin, batch)), dim=2)


def window_bands(
    model: SegmentationModel, images: Tensor, window: int, stride: int = 0, margin: int | None = None, batch: int = 8
) -> Iterator[Tensor]:
    """`slide_window` from top to bottom, in bands (B, K, rows, W) that no later window changes."""
    stride = stride or max(GRID, window * 2 // 3 // GRID * GRID)
    if window < GRID or not 0 < stride <= window:
        raise UsageError(
            f"expected a window of at least {GRID} px and a stride of at most the window; got {window} and {stride}."
        )
    overlap = window - stride
    margin = overlap // 4 if margin is None else margin
    if 2 * margin > overlap:
        raise ValueError(f"margin ({margin}) must not exceed half the overlap of the windows ({overlap} px).")
    height, width = images.shape[2:]
    row_spans, column_spans = window_spans(height, window, stride), window_spans(width, window, stride)
    carried: tuple[Tensor, Tensor] | None = None  # weighted logits and weights of rows that the next windows overlap
    for row, (top, bottom) in enumerate(row_spans):
        weight = images.new_zeros(bottom - top, width, dtype=torch.float32)
        total = None
        row_weights = window_weights(top, bottom, height, overlap, margin, images.device)[:, None]
        for group in _group_by_width(column_spans, max(1, batch // images.shape[0])):
            crops = torch.cat([images[:, :, top:bottom, left:right] for left, right in group])
            for (left, right), logits in zip(group, model(crops).float().chunk(len(group)), strict=True):
                crop_weight = row_weights * window_weights(left, right, width, overlap, margin, images.device)
                if total is None:
                    total = logits.new_zeros(images.shape[0], logits.shape[1], bottom - top, width)
                total[:, :, :, left:right] += crop_weight * logits
                weight[:, left:right] += crop_weight
        assert total is not None  # there is at least one window per row
        if carried is not None:
            rows = carried[1].shape[0]
            total[:, :, :rows] += carried[0]
            weight[:rows] += carried[1]
        done = (row_spans[row + 1][0] if row + 1 < len(row_spans) else height) - top
        yield total[:, :, :done] / weight[:done]
        carried = total[:, :, done:], weight[done:]


def window_spans(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Start and end of the windows along one side: equal steps, the last window cut at the image's edge."""
    if length <= window:
        return [(0, length)]
    steps, grid = -(-(length - window) // stride), gcd(stride, GRID)
    last = -(-(length - window) // grid) * grid  # the first grid position from which a window reaches the edge
    return [(start, min(start + window, length)) for start in (*range(0, steps * stride, stride), last)]


def window_weights(start: int, end: int, length: int, overlap: int, margin: int, device: torch.device) -> Tensor:
    """Weights (end - start,): 0 in the margin, rising to 1 over the overlap, 1 at the image's edges."""
    position = torch.arange(end - start, device=device) + 0.5
    weights = torch.ones(end - start, device=device)
    ramp = max(overlap - 2 * margin, 1)
    if start > 0:
        weights = weights * ((position - margin) / ramp).clamp(0, 1)
    if end < length:
        weights = weights * ((end - start - position - margin) / ramp).clamp(0, 1)
    return weights


def _group_by_width(spans: list[tuple[int, int]], max_size: int) -> Iterator[list[tuple[int, int]]]:
    """Consecutive windows of equal width, at most `max_size` per group."""
    group: list[tuple[int, int]] = []
    for span in spans:
        if group and (len(group) == max_size or span[1] - span[0] != group[0][1] - group[0][0]):
            yield group
            group = []
        group.append(span)
    yield group
