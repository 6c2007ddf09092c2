"""Objects of an exported Mask R-CNN: what torchvision computes between its graphs and after them, in numpy."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade._extras import require

MIN_PROPOSAL_SIDE = 1e-3  # smaller boxes are dropped, as in torchvision's RegionProposalNetwork
MIN_OBJECT_SIDE = 1e-2  # and in its RoIHeads
SHIFTED_BOXES = 1000  # up to this number torchvision's batched_nms shifts groups apart instead of splitting them


class Objects(NamedTuple):
    """Objects of one image, most certain first."""

    boxes: np.ndarray  # (n, 4) in pixels of the graph's input
    labels: np.ndarray  # (n,) from 1
    scores: np.ndarray  # (n,)
    masks: np.ndarray | None = None  # (n, 28, 28) probabilities in the box


class RegionSessions:
    """The graphs after the proposals of Mask R-CNN, next to the file that names them.

    Args:
        open_session: path -> ONNX Runtime session.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], open_session: Callable[[Path], Any]):
        self.settings: dict[str, Any] = metadata["selection"]
        self.sessions: dict[str, Any] = {}
        for name, part in metadata["graphs"].items():
            file = path.parent / Path(part["file"]).name  # never another folder
            if not file.is_file():
                raise ValueError(
                    f"expected {part['file']} next to {path}, which needs it. Copy all files of the export."
                )
            if hashlib.sha256(file.read_bytes()).hexdigest() != part["sha256"]:
                raise ValueError(f"{file} is not from the export that wrote {path}. Copy all files of one export.")
            self.sessions[name] = open_session(file)

    def __call__(self, outputs: Sequence[np.ndarray], size: tuple[int, int]) -> list[Objects]:
        """Outputs of the first graph for images of `size` (height, width) -> objects of every image."""
        objectness, boxes, levels, *features = outputs
        proposals = [select_proposals(*image, levels, self.settings) for image in zip(objectness, boxes, strict=True)]
        sizes = np.array([size] * len(proposals), np.float32)
        scores, refined = self.run("regions", features, proposals, sizes)
        objects = [
            select_objects(*image, self.settings)
            for image in zip(_split(scores, proposals), _split(refined, proposals), strict=True)
        ]
        if "masks" not in self.sessions:
            return objects
        boxes, labels = [image.boxes for image in objects], np.concatenate([image.labels for image in objects])
        (masks,) = self.run("masks", features, boxes, labels)
        return [image._replace(masks=part) for image, part in zip(objects, _split(masks, boxes), strict=True)]

    def run(
        self, name: str, features: Sequence[np.ndarray], boxes: Sequence[np.ndarray], last: np.ndarray
    ) -> list[np.ndarray]:
        """Run a graph on the boxes (n, 4) of every image; its last input is `sizes` or `labels`."""
        session = self.sessions[name]
        image = np.repeat(np.arange(len(boxes)), [len(part) for part in boxes])
        values = [*features, np.concatenate(boxes).astype(np.float32), image, last]
        return session.run(None, dict(zip((entry.name for entry in session.get_inputs()), values, strict=True)))


def _split(values: np.ndarray, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rows of all images -> rows of every image, as many as in `parts`."""
    return np.split(values, np.cumsum([len(part) for part in parts])[:-1])


def select_proposals(
    objectness: np.ndarray, boxes: np.ndarray, levels: np.ndarray, settings: dict[str, Any]
) -> np.ndarray:
    """objectness (A,), boxes (A, 4) and levels (A,) of all anchors -> proposals (n, 4), most certain first."""
    order = np.argsort(-objectness, kind="stable")
    best = [order[levels[order] == level][: settings["rpn_pre_nms_top_n"]] for level in np.unique(levels)]
    index = np.concatenate(best)
    scores = 1 / (1 + np.exp(-objectness[index]))
    valid = (sides(boxes[index]).min(1) >= MIN_PROPOSAL_SIDE) & (scores >= settings["rpn_score_thresh"])
    index, scores = index[valid], scores[valid]
    chosen = batched_nms(boxes[index], scores, levels[index], settings["rpn_nms_thresh"])
    return boxes[index[chosen[: settings["rpn_post_nms_top_n"]]]]


def select_objects(scores: np.ndarray, boxes: np.ndarray, settings: dict[str, Any]) -> Objects:
    """scores (n, K) and boxes (n, K, 4) of every proposal and class -> the objects of an image."""
    region, label = np.nonzero(scores > settings["box_score_thresh"])
    scores, boxes, label = scores[region, label], boxes[region, label], label + 1
    valid = sides(boxes).min(1) >= MIN_OBJECT_SIDE
    scores, boxes, label = scores[valid], boxes[valid], label[valid]
    chosen = batched_nms(boxes, scores, label, settings["box_nms_thresh"])[: settings["box_detections_per_img"]]
    return Objects(boxes[chosen], label[chosen], scores[chosen])


def sides(boxes: np.ndarray) -> np.ndarray:
    """Width and height (n, 2)."""
    return boxes[:, 2:] - boxes[:, :2]


def batched_nms(boxes: np.ndarray, scores: np.ndarray, groups: np.ndarray, threshold: float) -> np.ndarray:
    """Non-maximum suppression within every group; indices by descending score, as torchvision's `batched_nms`.

    Like it, few boxes are shifted apart by group, in float32, so that overlaps are rounded in the same way.
    """
    if not len(boxes):
        return np.zeros(0, np.int64)
    if len(boxes) <= SHIFTED_BOXES:
        boxes = boxes + (groups.astype(np.float32) * (boxes.max() + np.float32(1)))[:, None]
        return nms(boxes, scores, threshold)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    chosen = np.sort(np.concatenate([index[nms(boxes[index], scores[index], threshold)] for index in members]))
    return chosen[np.argsort(-scores[chosen], kind="stable")]


def nms(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> np.ndarray:
    """Boxes (n, 4) that no box of a higher score overlaps by an IoU above `threshold`; indices by descending score."""
    order = np.argsort(-scores, kind="stable")
    boxes = boxes[order]
    areas = sides(boxes).prod(1)
    suppressed = np.zeros(len(boxes), bool)
    for i in range(len(boxes)):
        if suppressed[i]:
            continue
        later = slice(i + 1, None)
        low, high = np.maximum(boxes[i, :2], boxes[later, :2]), np.minimum(boxes[i, 2:], boxes[later, 2:])
        shared = np.maximum(high - low, 0).prod(1)
        with np.errstate(invalid="ignore"):  # 0 / 0 of empty boxes
            iou = shared / (areas[i] + areas[later] - shared)
        suppressed[later] |= iou.astype(np.float64) > threshold  # torchvision compares float32 with a double
    return order[~suppressed]


def paste_masks(masks: np.ndarray, boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Probabilities (n, S, S) in boxes (n, 4) -> masks (n, H, W) bool, as torchvision's `paste_masks_in_image`."""
    from saccade.inference.onnx_predict import resize

    side = masks.shape[-1]
    padded = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    half, centre = sides(boxes) * np.float32(0.5), (boxes[:, 2:] + boxes[:, :2]) * np.float32(0.5)
    half = half * np.float32((side + 2) / side)
    corners = np.concatenate([centre - half, centre + half], 1).astype(np.int64)
    pasted = np.zeros((len(masks), height, width), bool)
    for target, mask, (x0, y0, x1, y1) in zip(pasted, padded, corners.tolist(), strict=True):
        rows, columns = max(y1 - y0 + 1, 1), max(x1 - x0 + 1, 1)
        left, top, right, bottom = max(x0, 0), max(y0, 0), min(x1 + 1, width), min(y1 + 1, height)
        values = resize(mask[None, None], rows, columns, antialias=False)[0, 0]
        target[top:bottom, left:right] = values[top - y0 : bottom - y0, left - x0 : right - x0] >= 0.5
    return pasted


def encode_masks(masks: np.ndarray) -> list[dict[str, Any]]:
    """Masks (n, H, W) bool -> COCO's compressed run lengths."""
    if not len(masks):
        return []
    encode = require("pycocotools.mask", "export").encode
    codes = encode(np.asfortranarray(masks.transpose(1, 2, 0).astype(np.uint8)))
    return [code | {"counts": code["counts"].decode()} for code in codes]
