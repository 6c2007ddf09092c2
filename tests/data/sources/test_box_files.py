"""YOLO and Pascal VOC folders."""

import pytest

from saccade.data.open import find_object_splits, open_split, open_train_and_val
from saccade.data.sources.base import DataError
from saccade.data.sources.box_files import MAX_XML_BYTES, BoxFiles, parse_voc, parse_yolo, yolo_pairs
from tests.data.mask_files import save

VOC = """<annotation><filename>a.jpg</filename><object><name>{}</name><difficult>0</difficult>
<bndbox><xmin>3</xmin><ymin>1</ymin><xmax>10</xmax><ymax>5</ymax></bndbox></object>
<object><name>cat</name><difficult>1</difficult>
<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object></annotation>"""


def write_image(path):
    save(path, [[[9, 9, 9]] * 20] * 10)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def yolo(root, images, labels, name="a", text="1 0.5 0.5 0.2 0.4\n"):
    write_image(root / images / f"{name}.png")
    write(root / labels / f"{name}.txt", text)


def test_yolo_yaml_names_classes_and_splits(tmp_path):
    yolo(tmp_path, "images/train", "labels/train")
    yolo(tmp_path, "images/val", "labels/val", text="0 0.25 0.5 0.5 1 \n\n1 0 0 0.5 0 0.5 0.2\n")
    write_image(tmp_path / "images/val/none.png")
    write(tmp_path / "data.yaml", "names: {0: cat, 1: dog}\ntrain: images/train\nval: images/val\n")
    for path in (tmp_path, tmp_path / "data.yaml"):
        train, val = open_train_and_val(path, find=find_object_splits)
        assert train.classes == val.classes == ["cat", "dog"]
        assert train.objects(0, (20, 10)).boxes.tolist() == [pytest.approx([8, 3, 12, 7])]
        assert val.objects(0, (20, 10)).boxes.tolist() == [[0, 0, 10, 10], pytest.approx([0, 0, 10, 2])]
        assert val.objects(0, (20, 10)).labels.tolist() == [1, 2]
        assert (len(val), len(val.objects(1, (20, 10)).boxes)) == (2, 0)
    truth = val.ground_truth()
    assert [entry["bbox"] for entry in truth["annotations"]] == [[0, 0, 10, 10], pytest.approx([0, 0, 10, 2])]


@pytest.mark.parametrize("layout", ["images/{}|labels/{}", "{}/images|{}/labels"])
def test_yolo_folders_without_yaml(tmp_path, layout):
    for split in ("train", "valid"):
        yolo(tmp_path, *layout.replace("{}", split).split("|"))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    splits = find_object_splits(tmp_path)
    assert list(splits) == ["train", "valid"]
    assert splits["valid"](classes=None).classes == ["cat", "dog"]


def test_yolo_roboflow_yaml_and_flat_folder(tmp_path):
    yolo(tmp_path, "train/images", "train/labels")
    write(tmp_path / "data.yaml", "names: [cat, dog]\ntrain: ../train/images\n")
    assert len(open_split(tmp_path, find=find_object_splits)) == 1
    yolo(tmp_path / "flat", "images", "labels")
    source = open_split(tmp_path / "flat", find=find_object_splits)
    assert source.classes == ["1"]


@pytest.mark.parametrize("text", ["1 0.5 0.5 0.2", "x 0 0 1 1", "1.5 0 0 1 1", "1 0 0 nan 1", "-1 0 0 1 1"])
def test_yolo_lines_are_checked(tmp_path, text):
    write(tmp_path / "a.txt", f"0 0 0 1 1\n{text}\n")
    with pytest.raises(DataError, match=r"a\.txt, line 2: expected class x y width height"):
        parse_yolo(tmp_path / "a.txt")


def test_yolo_images_listed_in_a_file_and_beside_their_labels(tmp_path):
    list_file = write(tmp_path / "train.txt", "images/a.jpg\n\nflat/b.png\n")
    assert yolo_pairs(list_file) == [
        (tmp_path / "images/a.jpg", tmp_path / "labels/a.txt"),
        (tmp_path / "flat/b.png", tmp_path / "flat/b.txt"),
    ]


def test_no_image_and_no_box_raise(tmp_path):
    with pytest.raises(DataError, match="got no image"):
        BoxFiles([], parse_yolo)
    with pytest.raises(DataError, match="expected boxes in"):
        BoxFiles([(tmp_path / "a.jpg", tmp_path / "a.txt")], parse_yolo)


def test_yolo_class_without_a_name_raises(tmp_path):
    yolo(tmp_path, "images", "labels", text="7 0 0 1 1")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match="expected classes 0 to 1 as named, got 7"):
        open_split(tmp_path, find=find_object_splits)
    write(tmp_path / "data.yaml", "train: images\n")
    with pytest.raises(DataError, match="expected a YOLO file with names"):
        find_object_splits(tmp_path)


def test_voc_splits_and_difficult_objects(tmp_path):
    for name, label in (("a", "dog"), ("b", "cat"), ("c", "dog")):
        write_image(tmp_path / f"JPEGImages/{name}.jpg")
        write(tmp_path / f"Annotations/{name}.xml", VOC.format(label))
    write(tmp_path / "ImageSets/Main/train.txt", "a\nb\n")
    write(tmp_path / "ImageSets/Main/val.txt", "c\n")
    write(tmp_path / "ImageSets/Main/dog_train.txt", "a 1\n")
    train, val = open_train_and_val(tmp_path, find=find_object_splits)
    assert (train.classes, len(train), len(val)) == (["cat", "dog"], 2, 1)
    objects = val.objects(0, (20, 10))
    assert objects.boxes.tolist() == [[2, 0, 10, 5], [0, 0, 2, 2]]
    assert (objects.labels.tolist(), objects.crowd.tolist()) == ([2, 1], [False, True])
    assert objects.masks is None
    assert val.read(0).size == (20, 10)
    write(tmp_path / "ImageSets/Main/val.txt", "c\nabsent\n")
    with pytest.raises(DataError, match=r"1 of 2 images are missing in .*JPEGImages, such as absent\.jpg"):
        open_train_and_val(tmp_path, find=find_object_splits)


def test_voc_files_beside_images(tmp_path):
    write_image(tmp_path / "train/a.jpg")
    write(tmp_path / "train/a.xml", VOC.format("dog"))
    assert open_split(tmp_path, find=find_object_splits).classes == ["cat", "dog"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<!DOCTYPE a [<!ENTITY x "xx">]><annotation>&x;</annotation>', "got a document type declaration"),
        ("<annotation>", r"cannot read .*a\.xml"),
        ("<a><object><name>x</name></object></a>", "expected bndbox with xmin"),
        (VOC.format("").replace("<name></name>", ""), "expected a name and finite corners in object 1"),
    ],
)
def test_voc_files_are_checked(tmp_path, text, message):
    write(tmp_path / "a.xml", text)
    with pytest.raises(DataError, match=message):
        parse_voc(tmp_path / "a.xml")


def test_voc_file_that_is_too_large_raises(tmp_path):
    file = write(tmp_path / "a.xml", "")
    with file.open("wb") as stream:
        stream.truncate(MAX_XML_BYTES + 1)
    with pytest.raises(DataError, match="expected at most"):
        parse_voc(file)


def test_voc_entities_in_utf16_are_refused(tmp_path):
    (tmp_path / "a.xml").write_bytes('<!DOCTYPE a [<!ENTITY x "xx">]><a>&x;</a>'.encode("utf-16"))
    with pytest.raises(DataError, match=r"cannot read .*a\.xml"):
        parse_voc(tmp_path / "a.xml")
