"""COCO average precision and result files, computed by pycocotools."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade._extras import require

METRIC_PREFIXES = {"bbox": "box", "segm": "mask"}  # pycocotools' iouType -> prefix of our metric names


class CocoMetric:
    """Average precision of boxes and, with `masks`, of masks: over IoU 0.5 to 0.95, at 0.5, at 0.75, by object size.

    Args:
        ground_truth: a dataset in COCO's format: images, annotations, categories.
        category_ids: the category id of label 1, 2, …; COCO's ids have gaps.
        max_detections: detections counted per image and class, 100 in COCO. AR is the recall of this many.
    """

    def __init__(
        self,
        ground_truth: Mapping[str, Any],
        category_ids: Sequence[int],
        masks: bool = True,
        max_detections: int = 100,
    ):
        self.ground_truth = ground_truth
        self.category_ids = list(category_ids)
        self.kinds = ("bbox", "segm") if masks else ("bbox",)
        if max_detections < 1:
            raise ValueError(f"max_detections must be at least 1, got {max_detections}.")
        self.max_detections = max_detections
        self.reset()

    def reset(self) -> None:
        self.image_ids: list[int] = []  # evaluated images, including those without detections
        self.results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in self.kinds}
        self.per_class: dict[str, list[float | None]] = {}  # AP per class of "box" and "mask", set by compute()

    def update(self, predictions: Sequence[Mapping[str, Tensor]], image_ids: Sequence[int]) -> None:
        """Add predictions of a detector in evaluation mode for the given images."""
        for prediction, image_id in zip(predictions, image_ids, strict=True):
            self.image_ids.append(int(image_id))
            self.results["bbox"] += box_results(prediction, int(image_id), self.category_ids)
            if "segm" in self.kinds:
                self.results["segm"] += mask_results(prediction, int(image_id), self.category_ids)

    def gather(self) -> None:
        """Collect the results of all distributed processes; every process must call this.

        An image that a distributed sampler repeated to fill a batch counts once.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (self.image_ids, self.results))
        self.reset()
        for ids, results in parts:
            new = set(ids) - set(self.image_ids)
            self.image_ids += ids
            for kind, entries in results.items():
                self.results[kind] += [entry for entry in entries if entry["image_id"] in new]

    def compute(self, by_size: bool = True) -> dict[str, float]:
        """box_ap, box_ap50, box_ap75, box_ap_small, …, box_ar, and the same for masks, each from 0 to 1.

        A metric without ground-truth objects (such as ap_large) is omitted; without detections AP is 0. `by_size=False`
        takes a third of the time, because pycocotools matches objects once per size range.
        """
        metrics: dict[str, float] = {}
        for kind in self.kinds:
            results = self.results[kind]
            values = evaluate_coco(self.ground_truth, results, kind, self.image_ids, self.max_detections, by_size)
            by_category, prefix = values.pop("per_category", {}), METRIC_PREFIXES[kind]
            self.per_class[prefix] = [by_category.get(category) for category in self.category_ids]
            metrics |= {f"{prefix}_{name}": value for name, value in values.items()}
        return metrics

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write detections.bbox.json and detections.segm.json, COCO's result format, for pycocotools' loadRes."""
        paths = []
        for kind in self.kinds:
            paths.append(Path(folder) / f"detections.{kind}.json")
            partial = paths[-1].with_suffix(".partial")
            partial.write_text(json.dumps(self.results[kind]))
            os.replace(partial, paths[-1])
        return paths


def box_results(prediction: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """COCO result entries of one image, with boxes as x, y, width, height."""
    boxes = prediction["boxes"].detach().double().cpu()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    entries = _result_entries(prediction, image_id, category_ids)
    return [entry | {"bbox": box} for entry, box in zip(entries, boxes.tolist(), strict=True)]


def mask_results(prediction: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """COCO result entries of one image, with masks as run lengths.

    Without a "bbox": pycocotools would compute object sizes from the box instead of the mask.
    """
    if "masks" not in prediction:
        raise ValueError("expected detections with masks, got boxes only. Evaluate boxes with masks=False.")
    codes = encode_masks(prediction["masks"][:, 0] >= 0.5)
    entries = _result_entries(prediction, image_id, category_ids)
    return [entry | {"segmentation": code} for entry, code in zip(entries, codes, strict=True)]


def encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """Boolean masks (n, H, W) -> COCO's compressed run lengths."""
    if not len(masks):
        return []
    encode = require("pycocotools.mask", "train").encode
    # Run lengths are column-major: transpose on the masks' device, before the copy to the CPU.
    columns = masks.detach().transpose(1, 2).contiguous().to(torch.uint8).cpu().numpy()  # (n, W, H)
    return [code | {"counts": code["counts"].decode()} for code in encode(columns.transpose(2, 1, 0))]


def evaluate_coco(
    ground_truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    kind: str,
    image_ids: Sequence[int],
    max_detections: int = 100,
    by_size: bool = True,
) -> dict[str, Any]:
    """AP and AR of result entries ("bbox" or "segm") on the given images, and AP `per_category`."""
    coco, cocoeval = require("pycocotools.coco", "train"), require("pycocotools.cocoeval", "train")
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull):  # pycocotools prints progress
        truth = coco.COCO()
        truth.dataset = deepcopy(dict(ground_truth))
        truth.createIndex()
        if results:
            detections = truth.loadRes(deepcopy(list(results)))
        else:  # loadRes reads the first entry
            detections = coco.COCO()
            images, categories = truth.dataset["images"], truth.dataset["categories"]
            detections.dataset = {"images": images, "categories": categories, "annotations": []}
            detections.createIndex()
        evaluator = cocoeval.COCOeval(truth, detections, kind)
        evaluator.params.imgIds = sorted(set(image_ids))
        evaluator.params.maxDets = [1, 10, max_detections]
        if not by_size:
            evaluator.params.areaRng, evaluator.params.areaRngLbl = evaluator.params.areaRng[:1], ["all"]
        evaluator.evaluate()
        evaluator.accumulate()
    if not evaluator.params.imgIds or not len(evaluator.eval):
        return {}
    precision = evaluator.eval["precision"][..., -1]  # (IoU thresholds, recall steps, categories, size ranges)
    recall = evaluator.eval["recall"][..., -1]  # (IoU thresholds, categories, size ranges)
    at = {round(float(iou), 2): i for i, iou in enumerate(evaluator.params.iouThrs)}
    values = {
        "ap": precision[..., 0],
        "ap50": precision[at[0.5], ..., 0],
        "ap75": precision[at[0.75], ..., 0],
        **{f"ap_{area}": precision[..., i] for i, area in enumerate(evaluator.params.areaRngLbl) if i},
        "ar": recall[..., 0],
    }
    means = {name: _mean_of_valid(value) for name, value in values.items()}
    by_category = {
        category: _mean_of_valid(precision[:, :, i, 0]) for i, category in enumerate(evaluator.params.catIds)
    }
    return {name: value for name, value in means.items() if value is not None} | {"per_category": by_category}


def _mean_of_valid(values: np.ndarray) -> float | None:
    """Mean without the -1 that pycocotools writes where there is no ground truth."""
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else None


def _result_entries(
    prediction: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    scores, labels = prediction["scores"].detach().double().tolist(), prediction["labels"].tolist()
    return [
        {"image_id": image_id, "category_id": category_ids[label - 1], "score": score}
        for score, label in zip(scores, labels, strict=True)
    ]
