"""Objects in Parquet, in the schema of the nuclei set and of Hugging Face's detection sets."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from saccade.data.open import open_object_split, open_train_and_val_objects
from saccade.data.sources.base import DataError
from saccade.data.sources.object_table import ObjectTable
from tests.data.coco_files import MINI

FEATURES = {
    "image": {"_type": "Image"},
    "objects": {"category": {"feature": {"names": ["nucleus"], "_type": "ClassLabel"}, "_type": "List"}},
    "instance_mask": {"_type": "Image"},
}


def png(array: np.ndarray) -> dict:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def rows(count: int = 3) -> list[dict]:
    """Nuclei-mini with exact masks, as rows."""
    source = open_object_split(MINI, "test_rle")
    found = []
    for i in range(count):
        image = source.read(i)
        objects = source.objects(i, image.size)
        assert objects.masks is not None
        numbered = (objects.masks * np.arange(1, len(objects.masks) + 1, dtype=np.uint16)[:, None, None]).max(0)
        boxes = np.concatenate([objects.boxes[:, :2], objects.boxes[:, 2:] - objects.boxes[:, :2]], 1)
        found.append(
            {
                "image": png(np.asarray(image)),
                "image_id": int(source.image_ids[i]),
                "objects": {
                    "id": objects.ids.tolist(),
                    "bbox": boxes.tolist(),
                    "category": (objects.labels - 1).tolist(),
                    "iscrowd": [0] * len(boxes),
                },
                "instance_mask": png(numbered),
            }
        )
    return found


def write(path, entries, features=FEATURES):
    table = pa.Table.from_pylist(entries)
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(about), path)
    return path


def test_parquet_gives_what_the_json_gives(tmp_path):
    table, source = ObjectTable([write(tmp_path / "test.parquet", rows())]), open_object_split(MINI, "test_rle")
    assert table.classes == ["nucleus"]
    assert table.has_masks
    for i in range(3):
        size = table.read(i).size
        ours, theirs = table.objects(i, size), source.objects(i, size)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
        assert table.image_ids[i] == source.image_ids[i]


def test_its_ground_truth_is_cocos_but_for_the_numbers(tmp_path):
    table, source = ObjectTable([write(tmp_path / "test.parquet", rows())]), open_object_split(MINI, "test_rle")
    ours = table.ground_truth()["annotations"]
    theirs = {note["id"]: note for note in source.ground_truth()["annotations"]}
    ids = [number for i in range(3) for number in table.objects(i, table.read(i).size).ids.tolist()]
    assert [note["id"] for note in ours] == list(range(1, len(ids) + 1))
    for note, number in zip(ours, ids, strict=True):
        assert note["bbox"] == theirs[number]["bbox"]
        assert note["area"] == theirs[number]["area"]
        assert note["category_id"] == 0


def test_boxes_alone_and_no_metadata_will_do(tmp_path):
    entries = rows(2)
    for entry in entries:
        del entry["instance_mask"], entry["image_id"], entry["objects"]["id"], entry["objects"]["iscrowd"]
    table = ObjectTable([write(tmp_path / "a.parquet", entries, {})])
    assert not table.has_masks
    assert table.classes == ["0"]
    assert table.image_ids.tolist() == [0, 1]
    objects = table.objects(0, table.read(0).size)
    assert objects.masks is None
    assert len(objects.ids) == len(objects.boxes) > 0


def test_a_row_without_objects(tmp_path):
    entries = rows(2)
    entries[0]["objects"] = {"id": [], "bbox": [], "category": [], "iscrowd": []}
    entries[0]["instance_mask"] = png(np.zeros((256, 256), np.uint16))
    objects = ObjectTable([write(tmp_path / "a.parquet", entries[::-1])]).objects(1, (256, 256))
    assert objects.boxes.shape == (0, 4)
    assert objects.masks is not None
    assert objects.masks.shape == (0, 256, 256)


def test_splits_by_file_name(tmp_path):
    write(tmp_path / "train-00000-of-00001.parquet", rows(3))
    write(tmp_path / "test-00000-of-00001.parquet", rows(1))
    train, test = open_train_and_val_objects(tmp_path)
    assert (len(train), len(test)) == (3, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row["objects"]["category"].__setitem__(0, 4), "row 0: object 0 has category 4"),
        (
            lambda row: row["objects"]["bbox"].__setitem__(1, [0.0, 0.0, float("nan"), 1.0]),
            "row 0: the box of object 1 is not finite",
        ),
        (
            lambda row: row.update(instance_mask=png(np.zeros((9, 9), np.uint16))),
            r"row 0: expected an instance_mask of shape \(256, 256\) .*got shape \(9, 9\)",
        ),
        (
            lambda row: row.update(instance_mask={"bytes": b"not a picture", "path": None}),
            "row 0: cannot read its instance_mask",
        ),
    ],
)
def test_a_broken_row_is_named(tmp_path, change, words):
    entries = rows(1)
    change(entries[0])
    table = ObjectTable([write(tmp_path / "a.parquet", entries)])
    with pytest.raises(DataError, match=words):
        table.objects(0, (256, 256))


def test_a_table_of_something_else_is_refused(tmp_path):
    entries = [{"image": row["image"], "label": 1} for row in rows(1)]
    with pytest.raises(DataError, match="expected a column `objects`"):
        ObjectTable([write(tmp_path / "a.parquet", entries)])
    entries = [{"image": row["image"], "objects": {"bbox": [[0.0, 0, 1, 1]]}} for row in rows(1)]
    with pytest.raises(DataError, match="expected objects with bbox and category"):
        ObjectTable([write(tmp_path / "b.parquet", entries)])
    entries = rows(2)
    entries[1]["image_id"] = entries[0]["image_id"]
    with pytest.raises(DataError, match="unique values of image_id"):
        ObjectTable([write(tmp_path / "c.parquet", entries)])
