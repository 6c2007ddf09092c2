"""Images and masks in Parquet files."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from saccade.data.decode.image import BadImage
from saccade.data.sources.mask_table import MaskTable

CLASSES = json.dumps(["sky", "road"])


def encode(values) -> dict:
    file = io.BytesIO()
    Image.fromarray(np.asarray(values, np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write(path, values, **metadata):
    """One row per value: a grey image of 5 x 4 px and a constant mask."""
    images = [encode(np.full((4, 5, 3), 9))] * len(values)
    table = pa.table({"annotation": [encode(np.full((4, 5), value)) for value in values], "image": images})
    pq.write_table(table.replace_schema_metadata({key: str(value) for key, value in metadata.items()}), path)
    return [path]


def test_masks_use_the_classes_and_ignored_value_of_the_metadata(tmp_path):
    files = write(tmp_path / "a.parquet", [0, 1, 7], class_names=CLASSES, ignore_index=7)
    source = MaskTable(files)
    assert (len(source), source.classes) == (3, ["sky", "road"])
    assert [int(source.read_mask(i)[0, 0]) for i in range(3)] == [0, 1, 255]
    assert source.read(2).size == (5, 4)
    assert source.name(1) == f"{files[0]}, row 1"


def test_arguments_replace_the_metadata(tmp_path):
    files = write(tmp_path / "a.parquet", [0, 1, 3], class_names=CLASSES, ignore_index=7)
    source = MaskTable(files, "image", "annotation", ["a", "b", "c"], None, 1, True)
    assert source.classes == ["a", "b", "c"]
    assert [int(source.read_mask(i)[0, 0]) for i in range(3)] == [255, 255, 2]


def test_image_column_is_not_the_mask_when_both_are_described_as_images(tmp_path):
    features = {"annotation": {"_type": "Image"}, "image": {"_type": "Image"}}
    metadata = json.dumps({"info": {"features": features}})
    source = MaskTable(write(tmp_path / "a.parquet", [0], class_names=CLASSES, huggingface=metadata))
    assert source.read(0).getpixel((0, 0)) == (9, 9, 9)


def test_value_out_of_range_raises_with_row_and_column(tmp_path):
    source = MaskTable(write(tmp_path / "a.parquet", [7], class_names=CLASSES))
    with pytest.raises(BadImage, match="row 0, annotation: mask value 7 is out of range: expected 0 to 1"):
        source.read_mask(0)


def test_classes_without_names_are_counted(tmp_path):
    source = MaskTable(write(tmp_path / "a.parquet", [0, 4, 255]))
    assert source.classes == ["0", "1", "2", "3", "4"]
    assert [int(source.read_mask(i)[0, 0]) for i in range(3)] == [0, 4, 255]
