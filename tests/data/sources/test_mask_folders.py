"""Image and mask folders: the layouts of ADE20K, Cityscapes, COCO-Stuff and LIP, and any two folders."""

import numpy as np
import pytest

from saccade.data.sources.base import DataError
from saccade.data.sources.class_names import CITYSCAPES
from saccade.data.sources.mask_folders import LAYOUTS, MaskFolders, find_layout
from saccade.data.sources.masks import LabelMap
from tests.data.mask_files import save, save_pair


def open_layout(path, split="train", **options) -> MaskFolders:
    """The split with the classes and the label convention of the layout at `path`."""
    match = find_layout(path, **options)
    assert match is not None
    layout, (images, masks) = match.layout, match.folders[split]
    label_map = LabelMap(len(layout.classes), layout.mapping, layout.reduce_zero_label)
    return MaskFolders(images, masks, layout.classes, label_map, layout.image_ending, layout.mask_ending)


def test_ade20k_stores_class_k_as_k_plus_1(tmp_path):
    save_pair(tmp_path, "images/training/a.jpg", "annotations/training/a.png", np.full((6, 8), 150))
    save_pair(tmp_path, "images/training/b.jpg", "annotations/training/b.png", np.eye(6, 8))
    source = open_layout(tmp_path)
    assert source.classes[:2] == ["wall", "building"]
    assert (source.read_mask(0) == 149).all()
    np.testing.assert_array_equal(source.read_mask(1), np.where(np.eye(6, 8), 0, 255))
    assert source.name(0) == str(tmp_path / "images/training/a.jpg")


@pytest.mark.parametrize(
    ("ending", "values"),
    [("labelIds", [[7, 26, 4], [33, 0, 255]]), ("labelTrainIds", [[0, 13, 255], [18, 255, 255]])],
)
def test_cityscapes_label_ids_and_train_ids_are_told_apart(tmp_path, ending, values):
    image = "leftImg8bit/train/bonn/bonn_1_leftImg8bit.png"
    save_pair(tmp_path, image, f"gtFine/train/bonn/bonn_1_gtFine_{ending}.png", values, (2, 3))
    save(tmp_path / "gtFine/train/bonn/bonn_1_gtFine_instanceIds.png", values)
    source = open_layout(tmp_path)
    assert source.classes == CITYSCAPES
    np.testing.assert_array_equal(source.read_mask(0), [[0, 13, 255], [18, 255, 255]])


def test_coco_stuff_maps_ids_with_and_without_things(tmp_path):
    stuff, things = tmp_path / "stuff", tmp_path / "things"
    save_pair(stuff, "train2017/1.jpg", "stuff_train2017_pixelmaps/1.png", [[92, 182, 183, 0]], (1, 4))
    np.testing.assert_array_equal(open_layout(stuff).read_mask(0), [[0, 90, 255, 255]])
    save_pair(things, "images/val2017/1.jpg", "annotations/val2017/1.png", [[0, 181, 11, 255]], (1, 4))
    np.testing.assert_array_equal(open_layout(things, "val").read_mask(0), [[0, 170, 255, 255]])  # id 12 is unused


@pytest.mark.shows("VT-70")
def test_coco_stuff_with_merged_classes_is_a_layout_on_request(tmp_path):
    """Things, a merged and a plain class, an unlabelled one; detectron2's prepared masks have the indices already."""
    files, prepared = tmp_path / "files", tmp_path / "prepared"
    save_pair(files, "images/val2017/1.jpg", "annotations/val2017/1.png", [[0, 93, 91, 181, 255]], (1, 5))
    assert len(find_layout(files).layout.classes) == 171
    source = open_layout(files, "val", requested="coco_stuff_merged")
    np.testing.assert_array_equal(source.read_mask(0), [[0, 37, 1, 255, 255]])  # person, branch, banner, wood
    save_pair(prepared, "val2017/1.jpg", "panoptic_stuff_val2017/1.png", [[0, 53, 255]], (1, 3))
    assert open_layout(prepared, "val").read_mask(0).tolist() == [[0, 53, 255]]
    assert len(open_layout(prepared, "val").classes) == 54


@pytest.mark.parametrize("prefix", ["", "TrainVal_"])
def test_lip_stores_class_indices(tmp_path, prefix):
    images = "TrainVal_images/train_images" if prefix else "train_images"
    masks = "TrainVal_parsing_annotations/train_segmentations" if prefix else "train_segmentations"
    save_pair(tmp_path, f"{images}/1_2.jpg", f"{masks}/1_2.png", [[0, 19]], (1, 2))
    source = open_layout(tmp_path)
    assert source.classes[19] == "right-shoe"
    assert source.read_mask(0).tolist() == [[0, 19]]


@pytest.mark.parametrize(
    ("images", "masks", "split"),
    [("images/train", "masks/train", "train"), ("val/images", "val/labels", "val"), ("images", "masks", "all")],
)
def test_any_two_folders_match(tmp_path, images, masks, split):
    save_pair(tmp_path, f"{images}/nested/a.jpg", f"{masks}/nested/a.png")
    match = find_layout(tmp_path)
    assert match is not None
    assert match.folders == {split: (tmp_path / images, tmp_path / masks)}
    assert match.layout.classes == []


def test_missing_masks_and_images_raise(tmp_path):
    save_pair(tmp_path, "images/a.jpg", "masks/a.png")
    save(tmp_path / "images/b.jpg", np.zeros((6, 8, 3)))
    with pytest.raises(DataError, match=r"1 of 2 images have no mask in .*masks: .*images/b.jpg needs b.png"):
        MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"])
    (tmp_path / "images/b.jpg").unlink()
    save(tmp_path / "masks/c.png", np.zeros((6, 8)))
    with pytest.raises(DataError, match=r"1 of 2 masks have no image in .*images: .*masks/c.png"):
        MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"])
    with pytest.raises(DataError, match=r"expected images in .*, got none"):
        MaskFolders(tmp_path / "empty", tmp_path / "masks", ["x", "y"])
    save(tmp_path / "images/a.png", np.zeros((6, 8, 3)))
    with pytest.raises(DataError, match=r"expected one file named a in .*images, got a\.(png|jpg) and a\.(png|jpg)"):
        MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"])


def test_unknown_or_absent_layout_raises(tmp_path):
    assert find_layout(tmp_path) is None
    with pytest.raises(DataError, match="does not have the layout ade20k: expected the folders images/training and"):
        find_layout(tmp_path, "ade20k")
    with pytest.raises(DataError, match=r"does not have the layout folders: expected an image folder \(images, "):
        find_layout(tmp_path, "folders")
    with pytest.raises(DataError, match=rf"to be auto, folders, {', '.join(LAYOUTS)}; got 'nonsense'"):
        find_layout(tmp_path, "nonsense")
