"""COCO's metric: equal to pycocotools run by hand on the files that are written."""

import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import decode

from saccade.data.open import open_object_split
from saccade.data.sources.coco import CocoSource
from saccade.data.sources.objects import ObjectSource
from saccade.data.synthetic.scenes import SceneObjects
from saccade.tasks.coco import CocoMetric, encode
from tests.data.coco_files import MINI, write

# Our names in the order of COCOeval.stats, which has recall at 1 and 10 detections in between
STATS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar": 8}


def guesses(source: ObjectSource, spoil: float, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The truth, moved by a few pixels, some of it missing, some under a wrong name, with made-up scores."""
    dice = np.random.default_rng(seed)
    found = []
    for i in range(len(source)):
        size = source.read(i).size
        objects = source.objects(i, size)
        kept = dice.random(len(objects.labels)) > spoil / 2
        boxes = objects.boxes[kept] + dice.normal(0, 4 * spoil, (kept.sum(), 4)).astype(np.float32)
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
        shifts = dice.integers(-3, 4, kept.sum()) * (spoil > 0)
        assert objects.masks is not None
        masks = [np.roll(mask, shift, 1) for mask, shift in zip(objects.masks[kept], shifts, strict=True)]
        labels = objects.labels[kept].copy()
        wrong = dice.random(len(labels)) < spoil / 4
        labels[wrong] = dice.integers(1, len(source.classes) + 1, wrong.sum())
        found.append(
            {
                "boxes": torch.from_numpy(boxes),
                "labels": torch.from_numpy(labels),
                "scores": torch.from_numpy(dice.random(len(labels)).astype(np.float32)),
                "masks": torch.from_numpy(np.array(masks).reshape(-1, 1, size[1], size[0])).float(),
            }
        )
    return found


def measured(source: ObjectSource, predictions, **options) -> CocoMetric:
    metric = CocoMetric(source.ground_truth(), source.category_ids, **options)
    metric.update(predictions, source.image_ids.tolist())
    return metric


def by_hand(truth: dict, results_file, kind: str, tmp_path) -> np.ndarray:
    """As COCO's own demonstration does it, with files."""
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    coco = COCO(str(tmp_path / "truth.json"))
    judge = COCOeval(coco, coco.loadRes(str(results_file)), kind)
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return judge.stats


@pytest.mark.parametrize("name", ["scenes", "nuclei", "odd"])
@pytest.mark.parametrize("spoil", [0.0, 0.5])
def test_the_figures_are_pycocotools_own(name, spoil, tmp_path):
    if name == "scenes":
        source: ObjectSource = SceneObjects(12, 96)
    elif name == "nuclei":
        source = open_object_split(MINI, "test_rle")
    else:
        source = CocoSource(write(tmp_path), tmp_path / "train")  # gaps in the numbers, a crowd, an empty picture
    metric = measured(source, guesses(source, spoil))
    ours, files = metric.compute(), metric.write(tmp_path)
    assert [file.name for file in files] == ["detections.bbox.json", "detections.segm.json"]
    for prefix, kind, file in zip(("box", "mask"), ("bbox", "segm"), files, strict=True):
        theirs = by_hand(source.ground_truth(), file, kind, tmp_path)
        for figure, place in STATS.items():
            if theirs[place] == -1:  # no objects of that size
                assert f"{prefix}_{figure}" not in ours
            else:
                assert ours[f"{prefix}_{figure}"] == theirs[place], (prefix, figure)
    boxes, masks = metric.per_class["box"], metric.per_class["mask"]
    assert len(boxes) == len(masks) == len(source.classes)
    quick = metric.compute(by_size=False)
    assert quick == {name: value for name, value in ours.items() if not name.endswith(("small", "medium", "large"))}
    known = [share for share in boxes if share is not None]
    assert sum(known) / len(known) == pytest.approx(ours["box_ap"])  # every class counts the same
    if spoil == 0.0 and name != "odd":
        assert ours["box_ap"] == ours["mask_ap"] == 1.0
    elif name != "odd":
        assert 0.05 < ours["box_ap"] < ours["box_ap50"] < 1.0


def test_results_carry_the_numbers_of_the_file(tmp_path):
    source = CocoSource(write(tmp_path), tmp_path / "train")
    metric = measured(source, guesses(source, 0.0))
    entries = json.loads(metric.write(tmp_path)[0].read_text())
    assert {entry["category_id"] for entry in entries} == {1, 7, 90}
    assert {entry["image_id"] for entry in entries} == {10, 20}
    first = entries[0]
    assert first["bbox"] == [5, 5, 10, 10]  # x, y, width, height
    assert set(first) == {"image_id", "category_id", "bbox", "score"}
    entry = json.loads((tmp_path / "detections.segm.json").read_text())[0]
    assert set(entry) == {"image_id", "category_id", "segmentation", "score"}  # a bbox here would spoil the sizes
    assert isinstance(entry["segmentation"]["counts"], str)


def nothing(size: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.long),
        "scores": torch.zeros(0),
        "masks": torch.zeros(0, 1, size[1], size[0]),
    }


def test_no_detection_anywhere_is_worth_nothing(tmp_path):
    source = SceneObjects(3, 64)
    metric = measured(source, [nothing((64, 64))] * 3)
    found = metric.compute()
    assert found["box_ap"] == found["box_ap50"] == found["mask_ap"] == found["mask_ar"] == 0.0
    assert json.loads(metric.write(tmp_path)[1].read_text()) == []
    metric.reset()
    assert metric.compute() == {}  # nothing was looked at, so nothing is known


def test_pictures_without_objects_count_what_is_wrongly_found_there(tmp_path):
    source = CocoSource(write(tmp_path), tmp_path / "train")
    predictions = guesses(source, 0.0)
    before = measured(source, predictions).compute()["box_ap"]
    wrong = {key: value[:1].clone() for key, value in predictions[0].items()}  # a bird in the empty picture
    wrong["scores"][:] = 2.0
    predictions[1] = wrong
    assert measured(source, predictions).compute()["box_ap"] < before


def test_only_pictures_that_were_looked_at_count():
    source = SceneObjects(6, 64)
    metric = CocoMetric(source.ground_truth(), source.category_ids)
    metric.update(guesses(source, 0.0)[:2], source.image_ids[:2].tolist())
    assert metric.compute()["box_ap"] == pytest.approx(1.0)


def test_more_than_a_hundred_objects_need_more_than_a_hundred_detections():
    """150 perfect detections: COCO's usual limit caps the recall at 100 / 150."""
    corners = torch.tensor([[4.0 * (i % 15), 4.0 * (i // 15)] for i in range(150)])
    boxes = torch.cat([corners, corners + 3], 1)
    notes = [
        {"id": i + 1, "image_id": 1, "category_id": 1, "area": 9.0, "iscrowd": 0, "bbox": [*box[:2].tolist(), 3.0, 3.0]}
        for i, box in enumerate(boxes)
    ]
    truth = {"images": [{"id": 1}], "annotations": notes, "categories": [{"id": 1, "name": "speck"}]}
    prediction = {"boxes": boxes, "labels": torch.ones(150, dtype=torch.long), "scores": torch.linspace(1, 0.5, 150)}
    for most, recall in ((100, 100 / 150), (400, 1.0)):
        metric = CocoMetric(truth, [1], masks=False, max_detections=most)
        metric.update([prediction], [1])
        assert metric.compute()["box_ar"] == pytest.approx(recall)


def test_masks_are_wanted_where_masks_are_measured():
    source = SceneObjects(1, 64)
    prediction = {key: value for key, value in guesses(source, 0.0)[0].items() if key != "masks"}
    with pytest.raises(ValueError, match="masks=False"):
        measured(source, [prediction])
    assert measured(source, [prediction], masks=False).compute()["box_ap"] == pytest.approx(1.0)


def test_run_lengths_go_down_the_columns():
    mask = torch.zeros(1, 3, 4, dtype=torch.bool)
    mask[0, 1, 2] = True
    (code,) = encode(mask)
    assert code["size"] == [3, 4]
    np.testing.assert_array_equal(decode(code), mask[0].numpy())
