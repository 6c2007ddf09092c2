"""Objects in Parquet files, in the schema of nuclei-mini and of Hugging Face's detection datasets."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from saccade.data.open import find_object_splits, open_split
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
    """nuclei-mini with its exact masks, as rows."""
    source = open_split(MINI, "test_rle", find=find_object_splits)
    entries = []
    for i in range(count):
        image = source.read(i)
        objects = source.objects(i, image.size)
        assert objects.masks is not None
        numbered = (objects.masks * np.arange(1, len(objects.masks) + 1, dtype=np.uint16)[:, None, None]).max(0)
        boxes = np.concatenate([objects.boxes[:, :2], objects.boxes[:, 2:] - objects.boxes[:, :2]], 1)
        entries.append(
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
    return entries


def write(path, entries, features=FEATURES):
    table = pa.Table.from_pylist(entries)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_parquet_equals_coco_json(tmp_path):
    table, source = (
        ObjectTable([write(tmp_path / "test.parquet", rows())]),
        open_split(MINI, "test_rle", find=find_object_splits),
    )
    assert table.classes == ["nucleus"]
    assert table.has_masks
    for i in range(3):
        size = table.read(i).size
        from_table, from_json = table.objects(i, size), source.objects(i, size)
        for actual, expected in zip(from_table, from_json, strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert table.image_ids[i] == source.image_ids[i]


def test_ground_truth_equals_coco_json_except_for_ids(tmp_path):
    table, source = (
        ObjectTable([write(tmp_path / "test.parquet", rows())]),
        open_split(MINI, "test_rle", find=find_object_splits),
    )
    annotations = table.ground_truth()["annotations"]
    expected = {annotation["id"]: annotation for annotation in source.ground_truth()["annotations"]}
    ids = [object_id for i in range(3) for object_id in table.objects(i, table.read(i).size).ids.tolist()]
    assert [annotation["id"] for annotation in annotations] == list(range(1, len(ids) + 1))
    for annotation, object_id in zip(annotations, ids, strict=True):
        assert annotation["bbox"] == expected[object_id]["bbox"]
        assert annotation["area"] == expected[object_id]["area"]
        assert annotation["category_id"] == 0


def test_masks_ids_and_metadata_are_optional(tmp_path):
    entries = rows(2)
    for entry in entries:
        del entry["instance_mask"], entry["image_id"], entry["objects"]["id"], entry["objects"]["iscrowd"]
    table = ObjectTable([write(tmp_path / "a.parquet", entries, {})])
    assert not table.has_masks
    assert table.classes == ["0"]
    assert table.image_ids.tolist() == [0, 1]
    objects = table.objects(0, table.read(0).size)
    assert objects.masks is None
    assert objects.ids.tolist() == list(range(len(entries[0]["objects"]["bbox"])))
    assert not objects.crowd.any()


def test_row_without_objects_has_empty_arrays(tmp_path):
    entries = rows(2)
    entries[0]["objects"] = {"id": [], "bbox": [], "category": [], "iscrowd": []}
    entries[0]["instance_mask"] = png(np.zeros((256, 256), np.uint16))
    objects = ObjectTable([write(tmp_path / "a.parquet", entries[::-1])]).objects(1, (256, 256))
    assert objects.boxes.shape == (0, 4)
    assert objects.masks is not None
    assert objects.masks.shape == (0, 256, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row["objects"]["category"].__setitem__(0, 4), "row 0: object 0 has category 4, expected 0 to 0"),
        (
            lambda row: row["objects"]["bbox"].__setitem__(1, [0.0, 0.0, float("nan"), 1.0]),
            "row 0: the box of object 1 is not finite",
        ),
        (
            lambda row: row.update(instance_mask=png(np.zeros((9, 9), np.uint16))),
            r"row 0: expected an instance_mask of shape \(256, 256\) .*got shape \(9, 9\)",
        ),
        (
            lambda row: row.update(instance_mask={"bytes": b"not an image", "path": None}),
            "row 0: cannot read its instance_mask",
        ),
    ],
)
def test_invalid_row_raises_with_its_index(tmp_path, change, message):
    entries = rows(1)
    change(entries[0])
    table = ObjectTable([write(tmp_path / "a.parquet", entries)])
    with pytest.raises(DataError, match=message):
        table.objects(0, (256, 256))


def test_table_without_objects_raises(tmp_path):
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
