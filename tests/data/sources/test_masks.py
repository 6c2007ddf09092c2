"""Segmentation sets on disk: every layout, and every way a pair can be wrong, named by its file."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from saccade.data.decode.image import BadImage, read_mask_values
from saccade.data.open import find_mask_splits, open_mask_split, open_train_and_val_masks
from saccade.data.sources import class_names
from saccade.data.sources.base import DataError
from saccade.data.sources.mask_folders import MaskFolders
from saccade.data.sources.masks import LabelMap, check_masks, hold_out_masks, read_pair
from saccade.data.synthetic.scenes import SceneMasks


def save(path, values, mode=None):
    """An array as a PNG or JPEG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, dtype=np.uint16 if mode == "I;16" else np.uint8))
    if mode == "P":
        image = image.convert("L")
        image.putpalette(list(np.random.default_rng(0).integers(256, size=768)))
    image.save(path)


def pair(root, picture, mask, values=None, size=(6, 8), mode=None):
    save(root / picture, np.full((*size, 3), 100))
    save(root / mask, np.zeros(size) if values is None else values, mode)


def test_the_lists_of_classes_are_the_sets_own():
    assert len(class_names.ADE20K) == len(set(class_names.ADE20K)) == 150
    assert len(class_names.CITYSCAPES) == len(class_names.CITYSCAPES_LABEL_IDS) == 19
    assert len(class_names.LIP) == 20
    assert len(class_names.COCO_THINGS) == 80
    assert len(class_names.COCO_STUFF) == len(class_names.COCO_STUFF_IDS) == 91
    assert sorted(class_names.COCO_IDS.values()) == list(range(171))
    names = class_names.COCO_THINGS + class_names.COCO_STUFF
    assert names[class_names.COCO_IDS[0]] == "person"
    assert names[class_names.COCO_IDS[89]] == "toothbrush"  # COCO id 90
    assert names[class_names.COCO_IDS[181]] == "wood"  # COCO id 182
    assert class_names.CITYSCAPES[class_names.CITYSCAPES_LABEL_IDS[26]] == "car"


def test_left_and_right_change_places_in_a_mirror():
    swap = class_names.flipped_classes(class_names.LIP)
    assert class_names.LIP[swap[class_names.LIP.index("left-shoe")]] == "right-shoe"
    assert [swap[i] for i in swap] == list(range(20))
    assert swap[:14] == list(range(14))
    assert class_names.flipped_classes(class_names.ADE20K) == list(range(150))


def test_ade20k(tmp_path):
    pair(tmp_path, "images/training/a.jpg", "annotations/training/a.png", np.full((6, 8), 150))
    pair(tmp_path, "images/training/b.jpg", "annotations/training/b.png", np.eye(6, 8))
    pair(tmp_path, "images/validation/c.jpg", "annotations/validation/c.png", np.full((6, 8), 3))
    train, val = open_train_and_val_masks(tmp_path)
    assert train.classes[:2] == ["wall", "building"]
    assert (train.read_mask(0) == 149).all()
    np.testing.assert_array_equal(train.read_mask(1), np.where(np.eye(6, 8), 0, 255))  # 0 is unlabelled
    assert (val.read_mask(0) == 2).all()
    assert val.name(0).endswith("images/validation/c.jpg")


def test_other_classes_in_folders_of_the_same_names(tmp_path):
    pair(tmp_path, "images/training/a.jpg", "annotations/training/a.png", np.eye(6, 8))
    (tmp_path / "classes.txt").write_text("off\non\n")
    source = open_mask_split(tmp_path)
    assert source.classes == ["off", "on"]
    np.testing.assert_array_equal(source.read_mask(0), np.eye(6, 8))


@pytest.mark.parametrize("kind", ["labelIds", "labelTrainIds"])
def test_cityscapes(tmp_path, kind):
    values = np.array([[7, 26, 4], [33, 0, 255]]) if kind == "labelIds" else np.array([[0, 13, 255], [18, 255, 255]])
    files = ("leftImg8bit/train/bonn/bonn_1_leftImg8bit.png", f"gtFine/train/bonn/bonn_1_gtFine_{kind}.png")
    pair(tmp_path, *files, values, (2, 3))
    save(tmp_path / "gtFine/train/bonn/bonn_1_gtFine_instanceIds.png", values)
    source = open_mask_split(tmp_path)
    assert source.classes == class_names.CITYSCAPES
    np.testing.assert_array_equal(source.read_mask(0), [[0, 13, 255], [18, 255, 255]])


def test_coco_stuff_and_lip(tmp_path):
    stuff, things, lip = tmp_path / "stuff", tmp_path / "things", tmp_path / "lip"
    pair(stuff, "train2017/1.jpg", "stuff_train2017_pixelmaps/1.png", [[92, 182, 183, 0]], (1, 4))
    np.testing.assert_array_equal(open_mask_split(stuff).read_mask(0), [[0, 90, 255, 255]])
    pair(things, "images/val2017/1.jpg", "annotations/val2017/1.png", [[0, 181, 11, 255]], (1, 4))
    source = open_mask_split(things)
    np.testing.assert_array_equal(source.read_mask(0), [[0, 170, 255, 255]])  # 11: "street sign", never annotated
    pair(lip, "train_images/1_2.jpg", "train_segmentations/1_2.png", [[0, 19]], (1, 2))
    assert open_mask_split(lip).classes[19] == "right-shoe"


@pytest.mark.parametrize("layout", ["images/train|masks/train", "train/images|train/labels", "images|masks"])
def test_any_pair_of_folders(tmp_path, layout):
    images, masks = layout.split("|")
    for i in range(4):
        pair(tmp_path, f"{images}/deep/{i}.jpg", f"{masks}/deep/{i}.png", np.full((6, 8), i % 3))
    train, val = open_train_and_val_masks(tmp_path, val_fraction=0.25)
    assert train.classes == ["0", "1", "2"]  # counted, as nothing names them
    assert (len(train), len(val)) == (3, 1)
    assert {train.name(i) for i in range(3)} | {val.name(0)} == {
        str(tmp_path / images / f"deep/{i}.jpg") for i in range(4)
    }


def test_names_from_id2label(tmp_path):
    pair(tmp_path, "images/a.png", "masks/a.png", np.eye(6, 8))
    (tmp_path / "id2label.json").write_text(json.dumps({"0": "ground", "1": "line"}))
    assert open_mask_split(tmp_path).classes == ["ground", "line"]


def write_table(path, rows, **metadata):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def encode(values):
        file = io.BytesIO()
        Image.fromarray(np.asarray(values, np.uint8)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    table = pa.table({"image": [encode(image) for image, _ in rows], "annotation": [encode(mask) for _, mask in rows]})
    pq.write_table(table.replace_schema_metadata({k: str(v) for k, v in metadata.items()}), path)


def test_parquet_with_the_schema_of_camvid(tmp_path):
    rows = [(np.full((4, 5, 3), 9), np.full((4, 5), i)) for i in (0, 1, 255)]
    write_table(tmp_path / "train.parquet", rows, class_names=json.dumps(["sky", "road"]), ignore_index=255)
    write_table(tmp_path / "val.parquet", rows[:1], class_names=json.dumps(["sky", "road"]), ignore_index=255)
    train, val = open_train_and_val_masks(tmp_path)
    assert train.classes == ["sky", "road"]
    assert [int(train.read_mask(i)[0, 0]) for i in range(3)] == [0, 1, 255]
    assert train.read(2).size == (5, 4)
    assert (len(train), len(val)) == (3, 1)
    write_table(tmp_path / "train.parquet", [(np.zeros((4, 5, 3)), np.full((4, 5), 7))], class_names='["a", "b"]')
    with pytest.raises(DataError, match="row 0, annotation: mask value 7 is out of range: expected 0 to 1"):
        open_train_and_val_masks(tmp_path)


def test_scenes_know_their_masks():
    source = SceneMasks(10, 64)
    image, mask = read_pair(source, 3)
    assert image.size == (64, 64)
    assert source.classes[0] == "backdrop"
    assert source.classes[source.labels[3] + 1] in [source.classes[value] for value in np.unique(mask)]
    train, val = open_train_and_val_masks("scenes", scenes=40, size=32)
    assert (len(train), len(val)) == (40, 10)


# What can be wrong


def test_missing_pairs_are_named(tmp_path):
    pair(tmp_path, "images/a.jpg", "masks/a.png")
    save(tmp_path / "images/b.jpg", np.zeros((6, 8, 3)))
    with pytest.raises(DataError, match=r"1 of 2 images have no mask .*images/b.jpg needs b.png"):
        open_mask_split(tmp_path, classes=["x", "y"])
    (tmp_path / "images/b.jpg").unlink()
    save(tmp_path / "masks/c.png", np.zeros((6, 8)))
    with pytest.raises(DataError, match=r"1 of 2 masks have no image .*masks/c.png"):
        open_mask_split(tmp_path, classes=["x", "y"])


def test_a_mask_of_another_size_is_named(tmp_path):
    save(tmp_path / "images/a.png", np.zeros((6, 8, 3)))
    save(tmp_path / "masks/a.png", np.zeros((8, 6)))
    source = MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"])
    with pytest.raises(BadImage, match=r"images/a.png: the image is 8 x 6 px, its mask 6 x 8 px"):
        read_pair(source, 0)
    with pytest.raises(DataError, match="1 of 1 checked training pairs are invalid"):
        check_masks(source)


def test_values_out_of_range_are_named_with_the_ways_out(tmp_path):
    pair(tmp_path, "images/a.jpg", "masks/a.png", np.arange(48).reshape(6, 8))
    source = MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y", "z"])
    with pytest.raises(
        BadImage, match=r"masks/a.png: mask value 3, 4, 5, 6, 7, ... is out of range: expected 0 to 2"
    ) as error:
        source.read_mask(0)
    assert "data.reduce_zero_label" in str(error.value)


def test_colour_masks_and_broken_files_are_named(tmp_path):
    save(tmp_path / "colour.png", np.random.default_rng(0).integers(256, size=(4, 4, 3)))
    with pytest.raises(BadImage, match=r"colour.png: expected a mask with one channel"):
        read_mask_values(tmp_path / "colour.png", str(tmp_path / "colour.png"))
    (tmp_path / "cut.png").write_bytes((tmp_path / "colour.png").read_bytes()[:60])
    with pytest.raises(BadImage, match=r"cut.png"):
        read_mask_values(tmp_path / "cut.png", str(tmp_path / "cut.png"))


def test_every_way_of_writing_numbers(tmp_path):
    values = np.array([[0, 1, 2], [3, 255, 0]])
    for mode in (None, "P", "I;16"):
        save(tmp_path / "mask.png", values, mode)
        np.testing.assert_array_equal(read_mask_values(tmp_path / "mask.png", "mask"), values)
    save(tmp_path / "grey.png", np.repeat(values[..., None], 3, 2))
    np.testing.assert_array_equal(read_mask_values(tmp_path / "grey.png", "mask"), values)


def test_numbering():
    values = np.array([[0, 1, 2, 255]])
    np.testing.assert_array_equal(LabelMap(3)(values, ""), values)
    np.testing.assert_array_equal(LabelMap(2, reduce_zero_label=True)(values, ""), [[255, 0, 1, 255]])
    np.testing.assert_array_equal(LabelMap(2, ignore_index=2)(values[:, :3], ""), [[0, 1, 255]])
    np.testing.assert_array_equal(LabelMap(2, {1: 1, 2: 0})(values, ""), [[255, 1, 0, 255]])
    with pytest.raises(DataError, match="expected at most 255 classes"):
        LabelMap(256)


def test_nothing_that_is_known(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        find_mask_splits(tmp_path / "absent")
    with pytest.raises(DataError, match="is not a segmentation dataset: expected a folder of images and one of masks"):
        find_mask_splits(tmp_path)
    with pytest.raises(DataError, match=r"does not have the layout ade20k: expected the folders images/training"):
        find_mask_splits(tmp_path, layout="ade20k")
    with pytest.raises(DataError, match=r"expected data.layout to be auto"):
        find_mask_splits(tmp_path, layout="nonsense")


def test_held_out_pictures_are_others():
    train, val = hold_out_masks(SceneMasks(20, 16), 0.3, seed=1)
    assert len(val) == 6
    assert set(train.indices) | set(val.indices) == set(range(20))
    again = hold_out_masks(SceneMasks(20, 16), 0.3, seed=1)[1]
    np.testing.assert_array_equal(val.indices, again.indices)
    np.testing.assert_array_equal(val.read_mask(2), SceneMasks(20, 16).read_mask(int(val.indices[2])))
