"""CocoMetric against pycocotools run on the written files."""

import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import decode

from saccade.data.open import find_object_splits, open_split
from saccade.data.sources.coco import CocoSource
from saccade.data.sources.objects import ObjectSource
from saccade.data.synthetic.scenes import SceneObjects
from saccade.tasks.coco_metric import CocoMetric, encode_masks
from tests.data.coco_files import MINI, write

# Our names in the order of COCOeval.stats, which has recall at 1 and 10 detections in between
STATS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar": 8}


def noisy_predictions(source: ObjectSource, spoil: float, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The ground truth with random scores: shifted, partly missing and mislabelled in proportion to `spoil`."""
    rng = np.random.default_rng(seed)
    predictions = []
    for i in range(len(source)):
        size = source.read(i).size
        objects = source.objects(i, size)
        detected = rng.random(len(objects.labels)) > spoil / 2
        boxes = objects.boxes[detected] + rng.normal(0, 4 * spoil, (detected.sum(), 4)).astype(np.float32)
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
        shifts = rng.integers(-3, 4, detected.sum()) * (spoil > 0)
        assert objects.masks is not None
        masks = [np.roll(mask, shift, 1) for mask, shift in zip(objects.masks[detected], shifts, strict=True)]
        labels = objects.labels[detected].copy()
        wrong = rng.random(len(labels)) < spoil / 4
        labels[wrong] = rng.integers(1, len(source.classes) + 1, wrong.sum())
        predictions.append(
            {
                "boxes": torch.from_numpy(boxes),
                "labels": torch.from_numpy(labels),
                "scores": torch.from_numpy(rng.random(len(labels)).astype(np.float32)),
                "masks": torch.from_numpy(np.array(masks).reshape(-1, 1, size[1], size[0])).float(),
            }
        )
    return predictions


def evaluate(source: ObjectSource, predictions, **options) -> CocoMetric:
    metric = CocoMetric(source.ground_truth(), source.category_ids, **options)
    metric.update(predictions, source.image_ids.tolist())
    return metric


def by_hand(truth: dict, results_file, kind: str, tmp_path) -> np.ndarray:
    """COCOeval.stats, computed as in pycocotools' demo."""
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    coco = COCO(str(tmp_path / "truth.json"))
    evaluator = COCOeval(coco, coco.loadRes(str(results_file)), kind)
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    return evaluator.stats


@pytest.mark.shows("PACA-60", "X-05")
@pytest.mark.parametrize("name", ["scenes", "nuclei", "odd"])
@pytest.mark.parametrize("spoil", [0.0, 0.5])
def test_metrics_equal_pycocotools(name, spoil, tmp_path):
    if name == "scenes":
        source: ObjectSource = SceneObjects(12, 96)
    elif name == "nuclei":
        source = open_split(MINI, "test_rle", find=find_object_splits)
    else:
        source = CocoSource(write(tmp_path), tmp_path / "train")  # gaps in the ids, a crowd, an empty image
    metric = evaluate(source, noisy_predictions(source, spoil))
    ours, files = metric.compute(), metric.write(tmp_path)
    assert [file.name for file in files] == ["detections.bbox.json", "detections.segm.json"]
    for prefix, kind, file in zip(("box", "mask"), ("bbox", "segm"), files, strict=True):
        theirs = by_hand(source.ground_truth(), file, kind, tmp_path)
        for name_of_metric, place in STATS.items():
            if theirs[place] == -1:  # no objects of that size
                assert f"{prefix}_{name_of_metric}" not in ours
            else:
                assert ours[f"{prefix}_{name_of_metric}"] == theirs[place], (prefix, name_of_metric)
    boxes, masks = metric.per_class["box"], metric.per_class["mask"]
    assert len(boxes) == len(masks) == len(source.classes)
    all_sizes = metric.compute(by_size=False)
    assert all_sizes == {name: value for name, value in ours.items() if not name.endswith(("small", "medium", "large"))}
    valid = [value for value in boxes if value is not None]
    assert sum(valid) / len(valid) == pytest.approx(ours["box_ap"])  # mean over classes
    if spoil == 0.0 and name != "odd":
        assert ours["box_ap"] == ours["mask_ap"] == 1.0
    elif name != "odd":
        assert 0.05 < ours["box_ap"] < ours["box_ap50"] < 1.0


def test_results_have_coco_ids(tmp_path):
    source = CocoSource(write(tmp_path), tmp_path / "train")
    metric = evaluate(source, noisy_predictions(source, 0.0))
    entries = json.loads(metric.write(tmp_path)[0].read_text())
    assert {entry["category_id"] for entry in entries} == {1, 7, 90}
    assert {entry["image_id"] for entry in entries} == {10, 20}
    first = entries[0]
    assert first["bbox"] == [5, 5, 10, 10]  # x, y, width, height
    assert set(first) == {"image_id", "category_id", "bbox", "score"}
    entry = json.loads((tmp_path / "detections.segm.json").read_text())[0]
    assert set(entry) == {
        "image_id",
        "category_id",
        "segmentation",
        "score",
    }  # sizes would come from a bbox
    assert isinstance(entry["segmentation"]["counts"], str)


def no_detections(size: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.long),
        "scores": torch.zeros(0),
        "masks": torch.zeros(0, 1, size[1], size[0]),
    }


def test_no_detections_have_ap_0(tmp_path):
    source = SceneObjects(3, 64)
    metric = evaluate(source, [no_detections((64, 64))] * 3)
    metrics = metric.compute()
    assert metrics["box_ap"] == metrics["box_ap50"] == metrics["mask_ap"] == metrics["mask_ar"] == 0.0
    assert json.loads(metric.write(tmp_path)[1].read_text()) == []
    metric.reset()
    assert metric.compute() == {}  # no images evaluated


def test_false_positives_in_empty_images_count(tmp_path):
    source = CocoSource(write(tmp_path), tmp_path / "train")
    predictions = noisy_predictions(source, 0.0)
    before = evaluate(source, predictions).compute()["box_ap"]
    wrong = {key: value[:1].clone() for key, value in predictions[0].items()}  # a detection in the empty image
    wrong["scores"][:] = 2.0
    predictions[1] = wrong
    assert evaluate(source, predictions).compute()["box_ap"] < before


def test_only_evaluated_images_count():
    source = SceneObjects(6, 64)
    metric = CocoMetric(source.ground_truth(), source.category_ids)
    metric.update(noisy_predictions(source, 0.0)[:2], source.image_ids[:2].tolist())
    assert metric.compute()["box_ap"] == pytest.approx(1.0)


def test_max_detections_limits_the_recall():
    """150 perfect detections: 100 of them reach a recall of 100 / 150."""
    corners = torch.tensor([[4.0 * (i % 15), 4.0 * (i // 15)] for i in range(150)])
    boxes = torch.cat([corners, corners + 3], 1)
    notes = [
        {"id": i + 1, "image_id": 1, "category_id": 1, "area": 9.0, "iscrowd": 0, "bbox": [*box[:2].tolist(), 3.0, 3.0]}
        for i, box in enumerate(boxes)
    ]
    truth = {"images": [{"id": 1}], "annotations": notes, "categories": [{"id": 1, "name": "speck"}]}
    prediction = {"boxes": boxes, "labels": torch.ones(150, dtype=torch.long), "scores": torch.linspace(1, 0.5, 150)}
    for max_detections, recall in ((100, 100 / 150), (400, 1.0)):
        metric = CocoMetric(truth, [1], masks=False, max_detections=max_detections)
        metric.update([prediction], [1])
        assert metric.compute()["box_ar"] == pytest.approx(recall)


def test_missing_masks_are_refused():
    source = SceneObjects(1, 64)
    prediction = {key: value for key, value in noisy_predictions(source, 0.0)[0].items() if key != "masks"}
    with pytest.raises(ValueError, match="masks=False"):
        evaluate(source, [prediction])
    assert evaluate(source, [prediction], masks=False).compute()["box_ap"] == pytest.approx(1.0)


def test_run_lengths_are_column_major():
    mask = torch.zeros(1, 3, 4, dtype=torch.bool)
    mask[0, 1, 2] = True
    (code,) = encode_masks(mask)
    assert code["size"] == [3, 4]
    np.testing.assert_array_equal(decode(code), mask[0].numpy())


def test_max_detections_must_be_positive():
    with pytest.raises(ValueError, match="max_detections must be at least 1, got 0"):
        CocoMetric({"images": [], "annotations": [], "categories": []}, [1], max_detections=0)
