"""Lists of labelled images: CSV and JSON lines, one label or several per image."""

import pytest

from saccade.data.open import find_splits, open_train_and_val
from saccade.data.sources.base import DataError
from saccade.data.sources.lists import ImageList
from tests.data.image_files import grey, png


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        (folder / f"{i}.png").write_bytes(png(10 * i))
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", "0.png,cat|dog\n1.png,\n2.png,dog\n3.png,bird | cat\n"),
        ("labels.csv", "labels;file\ncat|dog;0.png\n;1.png\ndog;2.png\nbird|cat;3.png\n"),
        ("labels.tsv", "file\tlabels\n0.png\tcat|dog\n1.png\t\n2.png\tdog\n3.png\tbird|cat\n"),
        (
            "labels.jsonl",
            '{"file_name": "0.png", "labels": ["cat", "dog"]}\n{"file_name": "1.png", "labels": []}\n\n'
            '{"file_name": "2.png", "labels": ["dog"]}\n{"file_name": "3.png", "labels": ["bird", "cat"]}\n',
        ),
    ],
)
def test_several_labels_per_image_are_multi_hot(tmp_path, name, text):
    file = write(tmp_path, name, text)
    source = ImageList(file)
    assert source.classes == ["bird", "cat", "dog"]
    assert source.labels.astype(int).tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 0]]
    assert [grey(source, i) for i in range(4)] == [0, 10, 20, 30]
    assert source.name(3) == str(tmp_path / "3.png")
    for path in (file, tmp_path):  # the list itself, or its folder
        assert find_splits(path)["all"](classes=None).classes == source.classes


def test_indices_are_named_by_classes_txt(tmp_path):
    file = write(tmp_path, "labels.csv", "0.png,0|2\n1.png,1\n")
    assert ImageList(file).classes == ["0", "1", "2"]
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    source = ImageList(file)
    assert (source.classes, source.labels.astype(int).tolist()) == (["a", "b", "c", "d"], [[1, 0, 1, 0], [0, 1, 0, 0]])


def test_one_label_per_image_is_an_index(tmp_path):
    source = ImageList(write(tmp_path, "labels.csv", "0.png,dog\n1.png,cat\n"))
    assert (source.classes, source.labels.tolist()) == (["cat", "dog"], [1, 0])
    source = ImageList(write(tmp_path, "labels.jsonl", '{"file": "0.png", "label": 1}\n{"file": "1.png", "label": 0}'))
    assert (source.classes, source.labels.tolist()) == (["0", "1"], [1, 0])


def test_splits_share_classes(tmp_path):
    write(tmp_path / "train", "labels.csv", "0.png,a|b\n1.png,c\n2.png,b\n")
    write(tmp_path / "val", "labels.csv", "0.png,c|a\n")
    train, val = open_train_and_val(tmp_path)
    assert (train.classes, val.classes) == (["a", "b", "c"], ["a", "b", "c"])
    assert val.labels.astype(int).tolist() == [[1, 0, 1]]
    write(tmp_path / "val", "labels.csv", "0.png,c|z\n")
    with pytest.raises(DataError, match="not in the training set: z"):
        open_train_and_val(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labels.csv", "0.png,cat\n1.png,\n", r"row 2: expected a label, got none. Separate several labels by |"),
        ("labels.jsonl", '{"file": "0.png"}', "line 1: expected a JSON object with a path .* and its labels"),
        ("labels.jsonl", "[1, 2]", "line 1: expected a JSON object"),
        ("labels.jsonl", '{"file": "a", "label": 1}\n{"file": "b", "label": [1]}', "all lists in .*, got int, list"),
        ("labels.jsonl", '{"file": "a", "labels": [1, "b"]}', "lists of class names or of indices"),
        ("labels.jsonl", '{"file": "a", "labels": [2, -1]}', "expected labels from 0 to 2 in .*, got -1"),
        ("labels.jsonl", '{"file": "a", "labels": []}', "got only empty lists"),
    ],
)
def test_unusable_list_raises(tmp_path, name, text, message):
    file = write(tmp_path, name, text)
    with pytest.raises(DataError, match=message):
        ImageList(file)
