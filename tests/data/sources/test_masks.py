"""Label maps, checks and subsets of segmentation datasets."""

import numpy as np
import pytest
from PIL import Image

from saccade.data.decode.image import BadImage
from saccade.data.sources.base import DataError, hold_out
from saccade.data.sources.mask_folders import MaskFolders
from saccade.data.sources.masks import IGNORE, LabelMap, check_masks, choose_labels, read_pair
from saccade.data.synthetic.scenes import SceneMasks
from tests.data.mask_files import save, save_pair

VALUES = np.array([[0, 1, 2, 255]])


@pytest.mark.parametrize(
    ("label_map", "expected"),
    [
        (LabelMap(3), [0, 1, 2, 255]),
        (LabelMap(2, reduce_zero_label=True), [255, 0, 1, 255]),
        (LabelMap(2, {1: 1, 2: 0}), [255, 1, 0, 255]),
        (LabelMap(2, {0: 1}, ignore_index=1), [1, 255, 255, 255]),
    ],
)
def test_label_map_converts_file_values(label_map, expected):
    labels = label_map(VALUES, "mask.png")
    assert labels.dtype == np.uint8
    assert labels.tolist() == [expected]


def test_label_map_ignores_the_given_value():
    assert LabelMap(2, ignore_index=2)(VALUES[:, :3], "").tolist() == [[0, 1, IGNORE]]


def test_label_map_rejects_values_out_of_range():
    with pytest.raises(
        BadImage, match=r"m.png: mask value 3, 4, 5, 6, 7, ... is out of range: expected 0 to 2"
    ) as error:
        LabelMap(3)(np.arange(48).reshape(6, 8), "m.png")
    assert "data.reduce_zero_label" in str(error.value)
    with pytest.raises(BadImage, match="mask value 3 is out of range: expected 1 to 2"):
        LabelMap(2, reduce_zero_label=True)(np.array([[1, 3]]), "m.png")
    with pytest.raises(BadImage, match="expected mask values of 0 to 65535, got -1 to 5"):
        LabelMap(3)(np.array([[-1, 5]]), "m.png")
    with pytest.raises(DataError, match=r"expected at most 255 classes .*, got 256"):
        LabelMap(256)


def test_pair_of_different_sizes_raises(tmp_path):
    save(tmp_path / "images/a.png", np.zeros((6, 8, 3)))
    save(tmp_path / "masks/a.png", np.zeros((8, 6)))
    source = MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"])
    with pytest.raises(BadImage, match=r"images/a.png: the image is 8 x 6 px, its mask 6 x 8 px"):
        read_pair(source, 0)
    with pytest.raises(DataError, match=r"1 of 1 checked training pairs are invalid: .*images/a.png"):
        check_masks(source)


def test_check_masks_tolerates_a_quarter_of_invalid_pairs(tmp_path):
    for i in range(8):
        save_pair(tmp_path, f"images/{i}.png", f"masks/{i}.png", np.full((6, 8), 9 if i < 2 else 1))
    source = MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"])
    check_masks(source)
    save(tmp_path / "masks/2.png", np.full((6, 8), 9))
    with pytest.raises(DataError, match="3 of 8 checked training pairs are invalid"):
        check_masks(source)


def test_check_masks_needs_labelled_pixels_and_two_classes(tmp_path):
    save_pair(tmp_path, "images/a.png", "masks/a.png", np.full((6, 8), IGNORE))
    with pytest.raises(DataError, match="no pixel is labelled in 1 checked validation masks"):
        check_masks(MaskFolders(tmp_path / "images", tmp_path / "masks", ["x", "y"]), "validation")
    with pytest.raises(DataError, match="expected at least two classes in the training set, got 'x' only"):
        check_masks(MaskFolders(tmp_path / "images", tmp_path / "masks", ["x"]))


def test_held_out_masks_partition_the_source():
    source = SceneMasks(20, 16)
    train, val = hold_out(source, 0.3, seed=1)
    assert len(val) == 6
    assert sorted([*train.indices, *val.indices]) == list(range(20))
    np.testing.assert_array_equal(val.read_mask(2), source.read_mask(int(val.indices[2])))
    assert val.name(2) == source.name(int(val.indices[2]))
    assert val.read(2).tobytes() == source.read(int(val.indices[2])).tobytes()


def listed(tmp_path, *masks):
    """Path and name of masks written to files."""
    for i, mask in enumerate(masks):
        save(tmp_path / f"{i}.png", mask)
    return [(tmp_path / f"{i}.png", f"mask {i}") for i in range(len(masks))]


def labels_of(masks, **options):
    names, label_map = choose_labels(len(masks), masks.__getitem__, "masks/", **options)
    return names, [label_map.read(*mask).tolist() for mask in masks]


def test_classes_are_counted_from_the_largest_value(tmp_path):
    masks = listed(tmp_path, [[0, 1], [255, 3]], [[2, 0], [0, 0]])
    (tmp_path / "0.jpg").write_bytes(b"")
    masks.append((tmp_path / "0.jpg", "damaged"))
    choose = lambda **options: choose_labels(3, masks.__getitem__, "masks/", **options)[0]  # noqa: E731
    assert choose() == ["0", "1", "2", "3"]
    assert choose(ignore_index=3, reduce_zero_label=True) == [str(i) for i in range(255)]
    assert choose(reduce_zero_label=True) == ["0", "1", "2"]


def test_masks_of_0_and_255_are_two_classes(tmp_path, caplog):
    masks = listed(tmp_path, [[0, 255], [255, 0]])
    assert labels_of(masks) == (["background", "foreground"], [[[0, 1], [1, 0]]])
    assert "masks/ have the values 0 and 255 only: read as two classes" in caplog.text
    assert labels_of(masks, classes=["a", "b"]) == (["a", "b"], [[[0, 1], [1, 0]]])
    assert labels_of(masks, ignore_index=255) == (["0"], [[[0, 255], [255, 0]]])
    assert labels_of(masks, classes=["a", "b", "c"])[1] == [[[0, 255], [255, 0]]]


def test_mask_values_list_the_value_of_every_class(tmp_path):
    masks = listed(tmp_path, [[0, 100], [255, 7]])
    assert labels_of(masks, mask_values=[255, 0]) == (["255", "0"], [[[1, 255], [0, 255]]])
    assert labels_of(masks, mask_values=[0, 255], classes=["a", "b"])[0] == ["a", "b"]
    with pytest.raises(DataError, match=r"one of data\.mask_values per class \(3\), got 2"):
        labels_of(masks, mask_values=[0, 255], classes=["a", "b", "c"])
    with pytest.raises(DataError, match=r"colours such as '#ff0000' in data\.mask_values, got 'red'"):
        labels_of(masks, mask_values=[0, "red"])


def test_mask_values_map_colours(tmp_path):
    colours = np.array([[[0, 0, 0], [255, 0, 0]], [[0, 128, 1], [9, 9, 9]]])
    masks = listed(tmp_path, colours)
    names, labels = labels_of(masks, mask_values=["#ff0000", "#008001"])
    assert (names, labels) == (["#ff0000", "#008001"], [[[255, 0], [1, 255]]])
    with pytest.raises(DataError, match=r"none of the 1 masks in masks/ can be read: mask 0: .*got a colour image"):
        labels_of(masks)


def test_jpeg_masks_are_refused(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "a.jpg")
    masks = [(tmp_path / "a.jpg", "a.jpg")]
    with pytest.raises(DataError, match=r"a\.jpg: expected a mask in a lossless format, got JPEG.* Save it as PNG"):
        labels_of(masks)
