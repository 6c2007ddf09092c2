"""Tokens as superpixels, compared with SLIC and a regular grid.

A segmentation is an integer array (H, W); the ground truth has `IGNORE` where it is unlabelled.
"""

from typing import NamedTuple

import numpy as np

from saccade._extras import require

IGNORE = -1


class SegmentationMetrics(NamedTuple):
    """Agreement of segments with the ground truth; higher is better except for undersegmentation."""

    segments: int  # distinct labels
    components: int  # connected components
    accuracy: float  # achievable: every segment is assigned its most frequent class
    recall: float  # fraction of ground-truth border pixels with a segment border within the tolerance
    undersegmentation: float  # leakage over true borders, the smaller side of every overlap, relative to the image
    compactness: float  # 1 for discs


def evaluate_segments(labels: np.ndarray, truth: np.ndarray, tolerance: float = 0.0075) -> SegmentationMetrics:
    """All metrics of one segmentation; borders match within `tolerance` of the diagonal (at least 1 px)."""
    if labels.shape != truth.shape:
        raise ValueError(f"expected labels of the ground truth's shape {truth.shape}, got {labels.shape}.")
    labelled = truth != IGNORE
    if not labelled.any():
        raise ValueError("expected ground truth with labelled pixels, got none.")
    overlap = contingency(labels[labelled], truth[labelled])
    sizes = overlap.sum(1, keepdims=True)
    distance = max(1.0, tolerance * float(np.hypot(*labels.shape)))
    return SegmentationMetrics(
        len(overlap),
        len(np.unique(connected_components(labels))),
        float(overlap.max(1).sum() / labelled.sum()),
        boundary_recall(labels, truth, distance),
        float(np.minimum(overlap, sizes - overlap).sum() / labelled.sum()),
        compactness(labels),
    )


def contingency(labels: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(segments, classes): number of pixels with both."""
    _, rows = np.unique(labels, return_inverse=True)
    _, columns = np.unique(truth, return_inverse=True)
    shape = rows.max() + 1, columns.max() + 1
    return np.bincount(rows.ravel() * shape[1] + columns.ravel(), minlength=shape[0] * shape[1]).reshape(shape)


def boundary_recall(labels: np.ndarray, truth: np.ndarray, max_distance: float) -> float:
    """Fraction of true border pixels with a segment border within `max_distance` pixels; 1 if there are none."""
    ndimage = require("scipy.ndimage", "train")
    true = inner_border(truth) & (truth != IGNORE)
    for axis in (0, 1):  # the edge of an unlabelled area is not a border
        for step in (-1, 1):
            true &= np.roll(truth, step, axis) != IGNORE
    if not true.any():
        return 1.0
    predicted = inner_border(labels)
    if not predicted.any():
        return 0.0
    distance = ndimage.distance_transform_edt(~predicted)
    return float((distance[true] <= max_distance).mean())


def inner_border(labels: np.ndarray) -> np.ndarray:
    """Pixels whose right or lower neighbour has another label."""
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:-1] |= labels[1:] != labels[:-1]
    edge[:, :-1] |= labels[:, 1:] != labels[:, :-1]
    return edge


def compactness(labels: np.ndarray) -> float:
    """Mean over pixels of 4 pi area / perimeter² of their connected component (Schick et al. 2012).

    The perimeter counts pixel sides, including those on the image border; a square has pi / 4.
    """
    components = connected_components(labels)
    area = np.bincount(components.ravel())
    sides = np.zeros(len(area))
    padded = np.pad(components, 1, constant_values=-1)
    for axis in (0, 1):
        for step in (-1, 1):
            differs = (padded != np.roll(padded, step, axis))[1:-1, 1:-1]
            sides += np.bincount(components[differs], minlength=len(area))
    quotient = 4 * np.pi * area / np.maximum(sides, 1) ** 2
    return float((quotient * area).sum() / area.sum())


def connected_components(labels: np.ndarray) -> np.ndarray:
    """Connected components (4 neighbours) of equal label, numbered from 0."""
    measure = require("skimage.measure", "train")
    return measure.label(labels, background=-(2**31), connectivity=1) - 1


def slic_segments(image: np.ndarray, count: int) -> np.ndarray:
    """SLIC superpixels of an image (H, W, 3) uint8, with a number of segments as close to `count` as possible.

    SLIC returns fewer segments than requested, especially on smooth images, so the request is adjusted up to 8 times.
    """
    segmentation = require("skimage.segmentation", "train")
    requested, best = float(max(count, 1)), np.zeros(image.shape[:2], dtype=int)
    for _ in range(8):
        labels = segmentation.slic(image, n_segments=max(round(requested), 1), compactness=10, start_label=0)
        actual = len(np.unique(labels))
        if abs(actual - count) < abs(len(np.unique(best)) - count):
            best = labels
        if actual == count:
            break
        requested = min(max(requested * count / actual, 1.0), 4.0 * count)
    return best


def grid_segments(size: tuple[int, int], count: int) -> np.ndarray:
    """Equal, nearly square cells, as close to `count` as possible: the segments of average pooling."""
    height, width = size
    rows = min(max(1, round((count * height / width) ** 0.5)), height)
    columns = min(max(1, round(count / rows)), width)
    row, column = np.arange(height) * rows // height, np.arange(width) * columns // width
    return row[:, None] * columns + column[None, :]
