"""Ground truth for scores, read through saccade.data."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from saccade.data.sources.base import DataError
from saccade.explanation.scores.ground_truth import open_ground_truth, read_sample
from saccade.explanation.scores.superpixels import IGNORE
from tests.explanation.scores.folders import quarters


def test_masks_of_folders_have_unlabelled_pixels(folders):
    source = open_ground_truth(folders)
    assert [source.name(i) for i in range(3)] == [str(folders / f"images/val/{i}.jpg") for i in range(3)]
    last = read_sample(source, 2)
    assert (last.mask[:5] == IGNORE).all()
    assert (last.mask[5:] == quarters()[5:]).all()
    assert last.boxes is None


def test_scenes_have_masks_that_match_their_boxes():
    source = open_ground_truth("scenes")
    assert len(source) == 1000
    sample = next(sample for sample in (read_sample(source, i) for i in range(20)) if len(sample.boxes) > 1)
    assert sample.image.size == (128, 128)
    for x0, y0, x1, y1 in sample.boxes.astype(int):
        extents = [np.where(sample.mask == i) for i in np.unique(sample.mask[y0:y1, x0:x1]) if i > 0]
        boxes = [(columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) for rows, columns in extents]
        assert (x0, y0, x1, y1) in boxes


def test_coco_objects_are_numbered_and_crowds_unlabelled(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val").mkdir()
    Image.new("RGB", (20, 10)).save(tmp_path / "val" / "a.jpg")
    objects = [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 1, 4, 5], "segmentation": [[2, 1, 6, 1, 6, 6, 2, 6]]},
        {
            "id": 2,
            "image_id": 7,
            "category_id": 3,
            "bbox": [10, 0, 9, 9],
            "iscrowd": 1,
            "segmentation": {"size": [10, 20], "counts": [100, 50, 50]},
        },
    ]
    document = {"images": [{"id": 7, "file_name": "a.jpg"}], "annotations": objects}
    path = tmp_path / "annotations" / "instances_val.json"
    path.write_text(json.dumps(document | {"categories": [{"id": 3, "name": "thing"}]}))
    sample = read_sample(open_ground_truth(path), 0)
    assert sample.boxes.tolist() == [[2, 1, 6, 6]]
    assert (sample.mask[1:6, 2:6] == 1).all()
    assert (sample.mask[:, 10:15] == IGNORE).all()
    assert (sample.mask == 0).sum() == 200 - 20 - 50
    (tmp_path / "val" / "a.jpg").unlink()
    with pytest.raises(DataError, match=r"cannot find the images of .*instances_val\.json"):
        open_ground_truth(path)


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
    sample = read_sample(open_ground_truth(tmp_path / "masks.parquet"), 0)
    assert (np.array(sample.image) == image).all()
    assert (sample.mask[0] == IGNORE).all()
    assert (sample.mask[1:] == mask[1:]).all()
    table = {
        "image": [encoded(image)],
        "instance_mask": [encoded(np.ones((12, 16), np.uint16))],
        "objects": [{"bbox": [[1.0, 2, 3, 4]], "category": [0]}],
    }
    parquet.write_table(arrow.table(table), tmp_path / "objects.parquet")
    sample = read_sample(open_ground_truth(tmp_path / "objects.parquet"), 0)
    assert (sample.mask == 1).all()
    assert sample.boxes.tolist() == [[1, 2, 4, 6]]
    parquet.write_table(arrow.table({"image": [encoded(image)], "caption": ["a"]}), tmp_path / "captions.parquet")
    with pytest.raises(DataError, match=r"expected images with objects or masks .* no mask column among"):
        open_ground_truth(tmp_path / "captions.parquet")


def test_other_data_is_refused(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        open_ground_truth(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"expected COCO annotations .* is not a segmentation dataset"):
        open_ground_truth(tmp_path)
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*b\.json"):
        open_ground_truth(tmp_path / "b.json")
