"""Labelled data sets for scoring."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from saccade.explain.scores.labelled import read_labelled
from saccade.explain.scores.superpixels import IGNORE
from tests.explain.scores.folders import quarters


def test_folders_pair_images_with_masks(folders):
    entries = list(read_labelled(folders))
    assert [entry.name for entry in entries] == ["0.jpg", "1.jpg", "2.jpg"]
    last = entries[2].read()
    assert (last.mask[:5] == IGNORE).all()
    assert (last.mask[5:] == quarters()[5:]).all()


def test_scenes_have_masks_that_match_their_boxes():
    sample = next(iter(read_labelled("scenes"))).read()
    assert sample.image.size == (128, 128)
    for number, (x0, y0, x1, y1) in enumerate(sample.boxes):
        rows, columns = np.where(sample.mask == number + 1)
        assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x0, y0, x1, y1)


def test_coco_has_boxes_and_masks(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val").mkdir()
    Image.new("RGB", (20, 10)).save(tmp_path / "val" / "a.jpg")
    objects = [
        {"image_id": 7, "category_id": 3, "bbox": [2, 1, 4, 5], "segmentation": [[2, 1, 6, 1, 6, 6, 2, 6]]},
        {
            "image_id": 7,
            "category_id": 3,
            "bbox": [10, 0, 9, 9],
            "iscrowd": 1,
            "segmentation": {"size": [10, 20], "counts": [100, 50, 50]},
        },
    ]
    document = {"images": [{"id": 7, "file_name": "a.jpg"}], "annotations": objects}
    path = tmp_path / "annotations" / "instances_val.json"
    path.write_text(json.dumps(document))
    sample = next(iter(read_labelled(path))).read()
    assert sample.boxes.tolist() == [[2, 1, 6, 6]]
    assert (sample.mask[1:6, 2:6] == 3).all()
    assert (sample.mask[:, 10:15] == IGNORE).all()
    assert (sample.mask == 0).sum() == 200 - 20 - 50
    (tmp_path / "val" / "a.jpg").unlink()
    with pytest.raises(ValueError, match=r"expected a\.jpg of .* in one of"):
        next(iter(read_labelled(path))).read()


def test_parquet_has_masks_or_objects(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def encoded(array):
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    image, mask = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8), quarters(12, 16)
    mask[0] = 255
    parquet.write_table(
        arrow.table({"image": [encoded(image)], "annotation": [encoded(mask)]}), tmp_path / "masks.parquet"
    )
    sample = next(iter(read_labelled(tmp_path / "masks.parquet"))).read()
    assert (np.array(sample.image) == image).all()
    assert (sample.mask[0] == IGNORE).all()
    instances = np.full((12, 16), 255, np.uint16)  # 255 is an object id here, not void
    table = {
        "image": [encoded(image)],
        "instance_mask": [encoded(instances)],
        "objects": [{"bbox": [[1.0, 2, 3, 4]]}],
    }
    parquet.write_table(arrow.table(table), tmp_path / "objects.parquet")
    sample = next(iter(read_labelled(tmp_path / "objects.parquet"))).read()
    assert (sample.mask == 255).all()
    assert sample.boxes.tolist() == [[1, 2, 4, 6]]
    parquet.write_table(arrow.table({"image": [encoded(image)], "label": [1]}), tmp_path / "labels.parquet")
    with pytest.raises(ValueError, match="expected a column image and one of annotation"):
        next(iter(read_labelled(tmp_path / "labels.parquet")))


def test_unsupported_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such data"):
        read_labelled(tmp_path / "nothing")
    with pytest.raises(ValueError, match="expected a folder images/ and one of annotations/"):
        read_labelled(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a COCO file with images and annotations"):
        read_labelled(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_labelled(tmp_path / "b.json")
    (tmp_path / "c.txt").write_text("{")
    with pytest.raises(ValueError, match="expected a Parquet file, a COCO JSON or a folder"):
        read_labelled(tmp_path / "c.txt")
