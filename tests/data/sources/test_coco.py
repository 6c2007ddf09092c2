"""COCO annotation files."""

import json
import pickle

import numpy as np
import pytest

from saccade.data.decode.image import BadImage
from saccade.data.open import find_object_splits, open_split, open_train_and_val
from saccade.data.sources.base import DataError
from saccade.data.sources.coco import CocoSource
from saccade.data.sources.objects import trainable_objects
from tests.data.coco_files import HEIGHT, MINI, WIDTH, half_mask, write


def source(tmp_path, change=None, **options) -> CocoSource:
    return CocoSource(write(tmp_path, change), tmp_path / "train", **options)


def test_labels_count_from_1_in_the_order_of_the_category_ids(tmp_path):
    dataset = source(tmp_path)
    assert dataset.classes == ["cat", "dog", "bird"]
    assert dataset.category_ids == [1, 7, 90]
    assert dataset.objects(0, (WIDTH, HEIGHT)).labels.tolist() == [3, 2, 1, 1]
    assert dataset.image_ids.tolist() == [10, 30, 20]
    assert dataset.has_masks


def test_polygons_and_both_kinds_of_run_lengths_are_rendered(tmp_path):
    objects = source(tmp_path).objects(0, (WIDTH, HEIGHT))
    square = np.zeros((HEIGHT, WIDTH), np.uint8)
    square[5:15, 5:15] = 1
    assert objects.masks is not None
    np.testing.assert_array_equal(objects.masks[0], square)
    np.testing.assert_array_equal(objects.masks[1], half_mask())
    np.testing.assert_array_equal(objects.masks[2], half_mask())
    assert objects.boxes[0].tolist() == [5, 5, 15, 15]


def test_image_without_objects_has_empty_arrays(tmp_path):
    objects = source(tmp_path).objects(1, (WIDTH, HEIGHT))
    assert objects.boxes.shape == (0, 4)
    assert objects.labels.shape == objects.ids.shape == (0,)
    assert objects.masks is not None
    assert objects.masks.shape == (0, HEIGHT, WIDTH)


def test_trainable_objects_exclude_crowds_and_empty_boxes_and_are_clipped(tmp_path):
    dataset = source(tmp_path)
    assert trainable_objects(dataset.objects(0, (WIDTH, HEIGHT)), (WIDTH, HEIGHT)).ids.tolist() == [1, 2, 3]
    remaining = trainable_objects(dataset.objects(2, (WIDTH, HEIGHT)), (WIDTH, HEIGHT))
    assert remaining.ids.tolist() == [5]
    assert remaining.boxes.tolist() == [[0, 5, 10, 15]]
    assert remaining.masks is not None
    assert remaining.masks.sum() == 100


def test_ground_truth_equals_the_file_without_degenerate_polygons(tmp_path):
    path = write(tmp_path)
    truth, file = CocoSource(path, tmp_path / "train").ground_truth(), json.loads(path.read_text())
    line = file["annotations"][6]
    assert line.pop("segmentation") == [[5, 5, 5, 15]]
    assert truth["annotations"][6].pop("segmentation") == [[0] * 6]
    assert truth == file


def test_ground_truth_fills_in_area_and_iscrowd(tmp_path):
    def change(document):
        for annotation in document["annotations"]:
            del annotation["area"], annotation["iscrowd"]

    truth = source(tmp_path, change).ground_truth()["annotations"]
    assert [annotation["area"] for annotation in truth[:2]] == [100.0, 200.0]
    assert {annotation["iscrowd"] for annotation in truth} == {0}


def test_missing_images_are_skipped_with_a_warning(tmp_path, caplog):
    path = write(tmp_path)
    (tmp_path / "train" / "b.png").unlink()
    dataset = CocoSource(path, tmp_path / "train")
    assert dataset.image_ids.tolist() == [10, 30]
    assert {annotation["image_id"] for annotation in dataset.ground_truth()["annotations"]} == {10}
    assert "b.png (image 20, annotation 5)" in caplog.text


def test_folder_without_any_image_raises(tmp_path):
    with pytest.raises(DataError, match=r"the 3 images .*got none: .*a.png \(image 10, annotation 1\)"):
        CocoSource(write(tmp_path), tmp_path / "nowhere")


def test_image_of_another_size_than_annotated_raises(tmp_path):
    dataset = source(tmp_path, lambda d: d["images"][0].update(width=50))
    with pytest.raises(BadImage, match=r"a.png: expected \(50, 30\) px as in instances_train.json, got \(40, 30\) px"):
        dataset.read(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["annotations"][1].update(image_id=99), "annotation 2: unknown image_id 99"),
        (lambda d: d["annotations"][1].update(category_id=2), "annotation 2: unknown category_id 2"),
        (lambda d: d["annotations"][4].update(bbox=[1, 2, 3]), "annotation 5: expected bbox as x, y, width, height"),
        (lambda d: d["annotations"][4].update(bbox=[1, 2, float("nan"), 4]), "annotation 5: expected bbox"),
        (lambda d: d["annotations"][4].update(id=3), "duplicate annotation id 3"),
        (lambda d: d["images"][1].update(id=10), "duplicate image id 10"),
        (lambda d: d["categories"][1].update(name="dog"), "got 2 for 3 categories"),
        (lambda d: d.pop("categories"), "expected a COCO annotation file, got .* without categories"),
    ],
)
def test_invalid_annotation_raises_with_its_id(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        source(tmp_path, change)


@pytest.mark.parametrize(
    "segmentation", [{"size": [30, 41], "counts": [1230]}, {"size": [30, 40], "counts": 5}, {"a": 1}]
)
def test_invalid_segmentation_raises_with_its_id(tmp_path, segmentation):
    dataset = source(tmp_path, lambda d: d["annotations"][0].update(segmentation=segmentation))
    with pytest.raises(DataError, match=r"instances_train.json, annotation 1: invalid segmentation"):
        dataset.objects(0, (WIDTH, HEIGHT))


def test_annotations_without_segmentation_have_no_masks(tmp_path):
    def change(document):
        for annotation in document["annotations"]:
            del annotation["segmentation"]

    dataset = source(tmp_path, change)
    assert not dataset.has_masks
    assert dataset.objects(0, (WIDTH, HEIGHT)).masks is None


def test_classes_of_another_split_decide_the_labels(tmp_path):
    dataset = source(tmp_path, classes=["bird", "cow", "cat", "dog"])
    assert dataset.objects(0, (WIDTH, HEIGHT)).labels.tolist() == [1, 4, 3, 3]
    assert dataset.category_ids[0::2] == [90, 1]
    assert dataset.category_ids[1] not in (1, 7, 90)  # unused id for a class that the file lacks
    with pytest.raises(DataError, match="not in the training set: dog"):
        source(tmp_path, classes=["bird", "cat"])


def test_source_survives_pickling(tmp_path):
    dataset = pickle.loads(pickle.dumps(source(tmp_path)))
    assert dataset.objects(0, (WIDTH, HEIGHT)).ids.tolist() == [1, 2, 3, 4]


def test_nuclei_mini_has_the_documented_counts():
    train, test = open_train_and_val(MINI, find=find_object_splits)
    assert (len(train), len(test)) == (24, 8)
    for dataset, count in ((train, 518), (test, 205)):
        sizes = [dataset.read(i).size for i in range(len(dataset))]
        assert sum(len(dataset.objects(i, size).labels) for i, size in enumerate(sizes)) == count
    assert test.classes == ["nucleus"]


def test_polygons_approximate_the_run_lengths():
    """The documentation of nuclei-mini reports a mean IoU of 0.99."""
    polygons, exact = (
        open_split(MINI, "test", find=find_object_splits),
        open_split(MINI, "test_rle", find=find_object_splits),
    )
    ious = []
    for i in range(len(polygons)):
        size = polygons.read(i).size
        a, b = polygons.objects(i, size).masks, exact.objects(i, size).masks
        assert a is not None
        assert b is not None
        ious += ((a & b).sum((1, 2)) / (a | b).sum((1, 2))).tolist()
    assert len(ious) == 205
    assert np.mean(ious) == pytest.approx(0.99, abs=0.005)
