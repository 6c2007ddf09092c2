"""Tokens judged as superpixels, beside SLIC and a plain grid.

A segmentation is a map of whole numbers (H, W). Truth has `IGNORE` where nobody knows.
"""

from typing import NamedTuple

import numpy as np

from saccade._extras import require

IGNORE = -1


class Superpixels(NamedTuple):
    """How well segments respect the truth; all but under-segmentation are better when higher."""

    segments: int  # different labels
    pieces: int  # connected parts of them
    accuracy: float  # achievable: every segment gets its best class
    recall: float  # of the true borders, found within the tolerance
    undersegmentation: float  # what leaks out of the true regions, smaller side of every overlap
    compactness: float  # 1 for discs


def judge(labels: np.ndarray, truth: np.ndarray, tolerance: float = 0.0075) -> Superpixels:
    """All numbers of one segmentation; `tolerance` of the diagonal is how far a border may be off (at least 1 px)."""
    if labels.shape != truth.shape:
        raise ValueError(f"labels are {labels.shape}, the truth is {truth.shape}: draw the labels at its size.")
    known = truth != IGNORE
    if not known.any():
        raise ValueError("the truth has no known pixel.")
    overlap = contingency(labels[known], truth[known])
    sizes = overlap.sum(1, keepdims=True)
    reach = max(1.0, tolerance * float(np.hypot(*labels.shape)))
    return Superpixels(
        len(overlap),
        len(np.unique(pieces(labels))),
        float(overlap.max(1).sum() / known.sum()),
        boundary_recall(labels, truth, reach),
        float(np.minimum(overlap, sizes - overlap).sum() / known.sum()),
        compactness(labels),
    )


def contingency(labels: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(segments, classes): pixels that have both."""
    _, rows = np.unique(labels, return_inverse=True)
    _, columns = np.unique(truth, return_inverse=True)
    shape = rows.max() + 1, columns.max() + 1
    return np.bincount(rows.ravel() * shape[1] + columns.ravel(), minlength=shape[0] * shape[1]).reshape(shape)


def boundary_recall(labels: np.ndarray, truth: np.ndarray, reach: float) -> float:
    """Share of true border pixels with a border of the segmentation within `reach` pixels; 1 without any border."""
    ndimage = require("scipy.ndimage", "train")
    true = inner_border(truth) & (truth != IGNORE)
    for axis in (0, 1):  # the edge of the unknown is no border
        for step in (-1, 1):
            true &= np.roll(truth, step, axis) != IGNORE
    if not true.any():
        return 1.0
    ours = inner_border(labels)
    if not ours.any():
        return 0.0
    distance = ndimage.distance_transform_edt(~ours)
    return float((distance[true] <= reach).mean())


def inner_border(labels: np.ndarray) -> np.ndarray:
    """Pixels whose right or lower neighbour has another label."""
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:-1] |= labels[1:] != labels[:-1]
    edge[:, :-1] |= labels[:, 1:] != labels[:, :-1]
    return edge


def compactness(labels: np.ndarray) -> float:
    """Mean over pixels of 4 pi area / perimeter² of the connected piece they lie in (Schick et al. 2012).

    The perimeter counts pixel sides, the rim of the image included; a square gets pi / 4.
    """
    parts = pieces(labels)
    area = np.bincount(parts.ravel())
    sides = np.zeros(len(area))
    padded = np.pad(parts, 1, constant_values=-1)
    for axis in (0, 1):
        for step in (-1, 1):
            differs = (padded != np.roll(padded, step, axis))[1:-1, 1:-1]
            sides += np.bincount(parts[differs], minlength=len(area))
    quotient = 4 * np.pi * area / np.maximum(sides, 1) ** 2
    return float((quotient * area).sum() / area.sum())


def pieces(labels: np.ndarray) -> np.ndarray:
    """Connected parts (4 neighbours) of equal label, numbered from 0."""
    measure = require("skimage.measure", "train")
    return measure.label(labels, background=-(2**31), connectivity=1) - 1


def slic(picture: np.ndarray, segments: int) -> np.ndarray:
    """SLIC superpixels of a picture (H, W, 3) uint8, as many as asked for or as near as it gets.

    SLIC makes fewer than it is asked for, by far on smooth pictures, so it is asked again for more (or less).
    """
    segmentation = require("skimage.segmentation", "train")
    asked, best = float(max(segments, 1)), np.zeros(picture.shape[:2], dtype=int)
    for _ in range(8):
        labels = segmentation.slic(picture, n_segments=max(round(asked), 1), compactness=10, start_label=0)
        found = len(np.unique(labels))
        if abs(found - segments) < abs(len(np.unique(best)) - segments):
            best = labels
        if found == segments:
            break
        asked = min(max(asked * segments / found, 1.0), 4.0 * segments)
    return best


def grid(size: tuple[int, int], segments: int) -> np.ndarray:
    """Average pooling's segments: equal cells, about as many as asked for and about square."""
    height, width = size
    rows = min(max(1, round((segments * height / width) ** 0.5)), height)
    columns = min(max(1, round(segments / rows)), width)
    row, column = np.arange(height) * rows // height, np.arange(width) * columns // width
    return row[:, None] * columns + column[None, :]
