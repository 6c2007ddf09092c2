"""COCO's JSON, as people write it."""

import json
import pickle

import numpy as np
import pytest

from saccade.data.decode.image import BadImage
from saccade.data.open import find_object_splits, open_object_split, open_train_and_val_objects
from saccade.data.sources.base import DataError
from saccade.data.sources.coco import CocoSource
from saccade.data.sources.objects import trainable_objects
from tests.data.coco_files import HEIGHT, MINI, WIDTH, half, write


def source(tmp_path, change=None, **options) -> CocoSource:
    return CocoSource(write(tmp_path, change), tmp_path / "train", **options)


def test_labels_count_from_one_in_the_order_of_the_ids_whatever_their_gaps(tmp_path):
    found = source(tmp_path)
    assert found.classes == ["cat", "dog", "bird"]
    assert found.category_ids == [1, 7, 90]
    assert found.objects(0, (WIDTH, HEIGHT)).labels.tolist() == [3, 2, 1, 1]
    assert found.image_ids.tolist() == [10, 30, 20]
    assert found.has_masks


def test_polygons_and_both_kinds_of_run_lengths_are_drawn(tmp_path):
    objects = source(tmp_path).objects(0, (WIDTH, HEIGHT))
    square = np.zeros((HEIGHT, WIDTH), np.uint8)
    square[5:15, 5:15] = 1
    assert objects.masks is not None
    np.testing.assert_array_equal(objects.masks[0], square)
    np.testing.assert_array_equal(objects.masks[1], half())
    np.testing.assert_array_equal(objects.masks[2], half())
    assert objects.boxes[0].tolist() == [5, 5, 15, 15]


def test_a_picture_without_objects_has_empty_arrays(tmp_path):
    objects = source(tmp_path).objects(1, (WIDTH, HEIGHT))
    assert objects.boxes.shape == (0, 4)
    assert objects.labels.shape == objects.ids.shape == (0,)
    assert objects.masks is not None
    assert objects.masks.shape == (0, HEIGHT, WIDTH)


def test_training_leaves_out_crowds_lines_and_what_lies_outside_and_cuts_what_lies_half_outside(tmp_path):
    found = source(tmp_path)
    assert trainable_objects(found.objects(0, (WIDTH, HEIGHT)), (WIDTH, HEIGHT)).ids.tolist() == [1, 2, 3]
    kept = trainable_objects(found.objects(2, (WIDTH, HEIGHT)), (WIDTH, HEIGHT))
    assert kept.ids.tolist() == [5]
    assert kept.boxes.tolist() == [[0, 5, 10, 15]]
    assert kept.masks is not None
    assert kept.masks.sum() == 100


def test_the_ground_truth_is_the_file(tmp_path):
    path = write(tmp_path)
    truth, file = CocoSource(path, tmp_path / "train").ground_truth(), json.loads(path.read_text())
    line = file["annotations"][6]
    assert line.pop("segmentation") == [[5, 5, 5, 15]]  # pycocotools stumbles over it
    assert truth["annotations"][6].pop("segmentation") == [[0] * 6]
    assert truth == file  # crowds and odd boxes too: pycocotools has its own way with them


def test_areas_and_crowd_marks_are_filled_in_where_a_file_has_none(tmp_path):
    def change(found):
        for note in found["annotations"]:
            del note["area"], note["iscrowd"]

    truth = source(tmp_path, change).ground_truth()["annotations"]
    assert [note["area"] for note in truth[:2]] == [100.0, 200.0]
    assert {note["iscrowd"] for note in truth} == {0}


def test_missing_pictures_are_left_out_and_told(tmp_path, caplog):
    path = write(tmp_path)
    (tmp_path / "train" / "b.png").unlink()
    found = CocoSource(path, tmp_path / "train")
    assert found.image_ids.tolist() == [10, 30]
    assert {note["image_id"] for note in found.ground_truth()["annotations"]} == {10}
    assert "b.png (image 20, annotation 5)" in caplog.text


def test_a_wrong_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"the 3 images .*got none: .*a.png \(image 10, annotation 1\)"):
        CocoSource(write(tmp_path), tmp_path / "nowhere")


def test_a_picture_of_another_size_than_the_file_says_is_bad(tmp_path):
    found = source(tmp_path, lambda d: d["images"][0].update(width=50))
    with pytest.raises(BadImage, match=r"a.png: expected \(50, 30\) px as in instances_train.json, got \(40, 30\) px"):
        found.read(0)


@pytest.mark.parametrize(
    ("change", "words"),
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
def test_a_broken_file_is_refused_with_the_number_of_what_is_wrong(tmp_path, change, words):
    with pytest.raises(DataError, match=words):
        source(tmp_path, change)


@pytest.mark.parametrize("shape", [{"size": [30, 41], "counts": [1230]}, {"size": [30, 40], "counts": 5}, {"a": 1}])
def test_a_mask_that_cannot_be_drawn_names_its_annotation(tmp_path, shape):
    found = source(tmp_path, lambda d: d["annotations"][0].update(segmentation=shape))
    with pytest.raises(DataError, match=r"instances_train.json, annotation 1: invalid segmentation"):
        found.objects(0, (WIDTH, HEIGHT))


def test_boxes_alone_will_do(tmp_path):
    def change(found):
        for note in found["annotations"]:
            del note["segmentation"]

    found = source(tmp_path, change)
    assert not found.has_masks
    assert found.objects(0, (WIDTH, HEIGHT)).masks is None


def test_the_other_splits_classes_decide_the_numbers(tmp_path):
    found = source(tmp_path, classes=["bird", "cow", "cat", "dog"])
    assert found.objects(0, (WIDTH, HEIGHT)).labels.tolist() == [1, 4, 3, 3]
    assert found.category_ids[0::2] == [90, 1]
    assert found.category_ids[1] not in (1, 7, 90)  # the file has no cows
    with pytest.raises(DataError, match="not in the training set: dog"):
        source(tmp_path, classes=["bird", "cat"])


def test_a_source_travels_to_another_process(tmp_path):
    found = pickle.loads(pickle.dumps(source(tmp_path)))
    assert found.objects(0, (WIDTH, HEIGHT)).ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("file", "images", "split"),
    [
        ("annotations/instances_train2017.json", "train2017", "train"),  # COCO
        ("annotations/instances_val.json", "images/val", "val"),
        ("train/_annotations.coco.json", "train", "train"),  # Roboflow
        ("labels.json", "images", "labels"),
    ],
)
def test_usual_layouts_are_found(tmp_path, file, images, split):
    path = write(tmp_path, None, file, images)
    assert list(find_object_splits(tmp_path)) == [split]
    for found in (open_object_split(tmp_path), open_object_split(path)):
        assert len(found) == 3
        assert found.read(2).getpixel((0, 0)) == (20, 0, 0)


def test_pictures_that_are_nowhere_near_are_an_error(tmp_path):
    path = write(tmp_path / "a", None, images="elsewhere/deep")
    with pytest.raises(DataError, match=r"cannot find the images of .*: a.png"):
        open_object_split(path)
    with pytest.raises(DataError, match="expected COCO annotations"):
        open_object_split(tmp_path / "a" / "elsewhere")
    with pytest.raises(DataError, match="no data at"):
        open_object_split(tmp_path / "b")


def test_nuclei_mini_has_what_its_card_says():
    train, test = open_train_and_val_objects(MINI)
    assert (len(train), len(test)) == (24, 8)
    for found, count in ((train, 518), (test, 205)):
        sizes = [found.read(i).size for i in range(len(found))]
        assert sum(len(found.objects(i, size).labels) for i, size in enumerate(sizes)) == count
    assert test.classes == ["nucleus"]


def test_polygons_nearly_are_the_exact_masks():
    """The set's card: polygons and run lengths of the same nuclei, mean IoU 0.99."""
    rough, exact = open_object_split(MINI, "test"), open_object_split(MINI, "test_rle")
    shares = []
    for i in range(len(rough)):
        size = rough.read(i).size
        a, b = rough.objects(i, size).masks, exact.objects(i, size).masks
        assert a is not None
        assert b is not None
        shares += ((a & b).sum((1, 2)) / (a | b).sum((1, 2))).tolist()
    assert len(shares) == 205
    assert np.mean(shares) > 0.985


def test_without_a_validation_split_some_pictures_are_held_out(tmp_path):
    write(tmp_path)
    train, val = open_train_and_val_objects(tmp_path, val_fraction=0.34)
    assert (len(train), len(val)) == (2, 1)
    assert not set(train.image_ids.tolist()) & set(val.image_ids.tolist())
    assert {about["id"] for about in val.ground_truth()["images"]} == set(val.image_ids.tolist())
    again, _ = open_train_and_val_objects(tmp_path, val_fraction=0.34)
    assert again.image_ids.tolist() == train.image_ids.tolist()
