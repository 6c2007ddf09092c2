"""COCO's measure of detections, and its result files, through pycocotools."""

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

KINDS = {"bbox": "box", "segm": "mask"}  # pycocotools' name, ours
AREAS = ("all", "small", "medium", "large")  # under 32 x 32 px, under 96 x 96, beyond


class CocoMetric:
    """Average precision of boxes and, with `masks`, of masks: over overlaps 0.5 to 0.95, at 0.5, at 0.75, by size.

    Args:
        ground_truth: a data set as COCO writes it: images, annotations, categories.
        category_ids: the category of label 1, 2, …; COCO's have gaps.
        max_detections: how many of an image's detections count for each class, 100 in COCO. Its third figure, AR,
            is the recall they reach.
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
            raise ValueError(f"at least one detection of a picture must count, got max_detections={max_detections}.")
        self.max_detections = max_detections
        self.reset()

    def reset(self) -> None:
        self.seen: list[int] = []  # ids of the images that were looked at, also where nothing was found
        self.results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in self.kinds}
        self.per_class: dict[str, list[float | None]] = {}  # AP of "box" and "mask", filled by compute()

    def update(self, predictions: Sequence[Mapping[str, Tensor]], image_ids: Sequence[int]) -> None:
        """Predictions of a detector in evaluation, and which images they belong to."""
        for prediction, image_id in zip(predictions, image_ids, strict=True):
            self.seen.append(int(image_id))
            self.results["bbox"] += box_results(prediction, int(image_id), self.category_ids)
            if "segm" in self.kinds:
                self.results["segm"] += mask_results(prediction, int(image_id), self.category_ids)

    def gather(self) -> None:
        """Take over what the other processes have seen, where there are several: all must call this. An image that came
        twice, to fill up a batch, counts once.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (self.seen, self.results))
        self.reset()
        for ids, found in parts:
            fresh = set(ids) - set(self.seen)
            self.seen += ids
            for kind, entries in found.items():
                self.results[kind] += [entry for entry in entries if entry["image_id"] in fresh]

    def compute(self, by_size: bool = True) -> dict[str, float]:
        """box_ap, box_ap50, box_ap75, box_ap_small, …, box_ar, and the same of masks; each from 0 to 1.

        What has no objects to find (large ones, say) is left out. No detections at all are worth 0. Without `by_size`,
        a third of the time: pycocotools matches objects of each size anew.
        """
        found: dict[str, float] = {}
        for kind in self.kinds:
            measured = evaluate(self.ground_truth, self.results[kind], kind, self.seen, self.max_detections, by_size)
            by_category = measured.pop("per_category", {})
            self.per_class[KINDS[kind]] = [by_category.get(number) for number in self.category_ids]
            found |= {f"{KINDS[kind]}_{name}": value for name, value in measured.items()}
        return found

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """The standard result files, detections.bbox.json and detections.segm.json: what pycocotools' loadRes reads."""
        paths = []
        for kind in self.kinds:
            paths.append(Path(folder) / f"detections.{kind}.json")
            partial = paths[-1].with_suffix(".partial")
            partial.write_text(json.dumps(self.results[kind]))
            os.replace(partial, paths[-1])
        return paths


def box_results(prediction: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """COCO's result entries of one image: x, y, width, height."""
    boxes = prediction["boxes"].detach().double().cpu()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    return [
        about | {"bbox": box}
        for about, box in zip(_about(prediction, image_id, category_ids), boxes.tolist(), strict=True)
    ]


def mask_results(prediction: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """COCO's result entries of one image: run lengths. Without a box beside them, which pycocotools would measure."""
    if "masks" not in prediction:
        raise ValueError("these detections have no masks: measure boxes alone (masks=False).")
    codes = encode_masks(prediction["masks"][:, 0] >= 0.5)
    return [
        about | {"segmentation": code}
        for about, code in zip(_about(prediction, image_id, category_ids), codes, strict=True)
    ]


def encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """masks (n, H, W) of truth values -> COCO's compressed run lengths."""
    if not len(masks):
        return []
    code = require("pycocotools.mask", "train").encode
    # Run lengths go down the columns: turned on the GPU if there is one, so that the CPU only reads.
    columns = masks.detach().transpose(1, 2).contiguous().to(torch.uint8).cpu().numpy()  # (n, W, H)
    return [one | {"counts": one["counts"].decode()} for one in code(columns.transpose(2, 1, 0))]


def evaluate(
    ground_truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    kind: str,
    image_ids: Sequence[int],
    max_detections: int = 100,
    by_size: bool = True,
) -> dict[str, Any]:
    """Average precision and recall of result entries, "bbox" or "segm", on some images, and AP `per_category`."""
    coco, cocoeval = require("pycocotools.coco", "train"), require("pycocotools.cocoeval", "train")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints as it goes
        true = coco.COCO()
        true.dataset = deepcopy(dict(ground_truth))
        true.createIndex()
        given = deepcopy(list(results))
        if given:
            answers = true.loadRes(given)
        else:  # loadRes looks at the first
            answers = coco.COCO()
            answers.dataset = {
                "images": true.dataset["images"],
                "categories": true.dataset["categories"],
                "annotations": [],
            }
            answers.createIndex()
        judge = cocoeval.COCOeval(true, answers, kind)
        judge.params.imgIds = sorted(set(image_ids))
        judge.params.maxDets = [1, 10, max_detections]
        if not by_size:
            judge.params.areaRng, judge.params.areaRngLbl = judge.params.areaRng[:1], list(AREAS[:1])
        judge.evaluate()
        judge.accumulate()
    if not judge.params.imgIds or not len(judge.eval):
        return {}
    precision, recall = judge.eval["precision"][..., -1], judge.eval["recall"][..., -1]  # (T, R, K, A), (T, K, A)
    at = {round(float(iou), 2): i for i, iou in enumerate(judge.params.iouThrs)}
    figures = {
        "ap": precision[..., 0],
        "ap50": precision[at[0.5], ..., 0],
        "ap75": precision[at[0.75], ..., 0],
        **{f"ap_{area}": precision[..., i] for i, area in enumerate(judge.params.areaRngLbl) if i},
        "ar": recall[..., 0],
    }
    means = {name: _mean(values) for name, values in figures.items()}
    by_category = {number: _mean(precision[:, :, i, 0]) for i, number in enumerate(judge.params.catIds)}
    return {name: value for name, value in means.items() if value is not None} | {"per_category": by_category}


def _mean(values: Any) -> float | None:
    """-1 marks what has no objects to find."""
    known = np.asarray(values)
    known = known[known > -1]
    return float(known.mean()) if known.size else None


def _about(prediction: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    scores, labels = prediction["scores"].detach().double().tolist(), prediction["labels"].tolist()
    return [
        {"image_id": image_id, "category_id": category_ids[label - 1], "score": score}
        for score, label in zip(scores, labels, strict=True)
    ]
