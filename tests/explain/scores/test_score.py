"""Scores on labelled sets, from the file to the page."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from saccade.explain.scores.labelled import Sample, read_labelled
from saccade.explain.scores.score import saliency, score
from saccade.explain.scores.superpixels import IGNORE
from saccade.tokens.trace import AssignmentTrace
from tests.explain.planted import quadrants, step

RANDOM = np.random.default_rng(0)


def quarters(height: int = 48, width: int = 64) -> np.ndarray:
    row, column = np.arange(height) * 2 // height, np.arange(width) * 2 // width
    return (row[:, None] * 2 + column[None]).astype(np.uint8)


@pytest.fixture
def folders(tmp_path):
    """Three pictures of four flat quarters, with the quarters as masks; the last mask has unknown pixels."""
    for name in ("images", "annotations"):
        (tmp_path / name / "val").mkdir(parents=True)
    for i in range(3):
        mask = quarters()
        colours = RANDOM.integers(0, 256, (4, 3), dtype=np.uint8)
        Image.fromarray(colours[mask]).save(tmp_path / "images" / "val" / f"{i}.jpg", quality=95)
        if i == 2:
            mask[:5] = 255
        Image.fromarray(mask).save(tmp_path / "annotations" / "val" / f"{i}.png")
    return tmp_path


class Quarters(nn.Module):
    """Tokens that are the quarters of the image, whatever it shows; the answer is made of the first."""

    class Group(nn.Module):
        def forward(self, images):
            tokens = nn.functional.adaptive_avg_pool2d(images, 2).flatten(2).mT
            return tokens, quadrants(32).assignment.expand(len(images), -1, -1)

        def trace(self, inputs, output):
            return AssignmentTrace(output[1], (32, 32), tokens=output[0])

    def __init__(self):
        super().__init__()
        self.group, self.bias = self.Group(), nn.Parameter(torch.zeros(2))

    def forward(self, images):
        bright = self.group(images)[0][:, 0].mean(1)
        return torch.stack([bright + 3, -bright], 1) + self.bias


def test_tokens_that_are_the_truth_are_perfect_superpixels(folders):
    found = score(folders, Quarters(), size=64)
    assert found.pictures == 3
    ours, rival, pooled = found.superpixels
    assert (ours["by"], rival["by"], pooled["by"]) == ("tokens", "SLIC", "average pooling")
    assert ours["segments"] == 4
    assert ours["accuracy"] > 0.99
    assert ours["recall"] > 0.95
    assert ours["undersegmentation"] < 0.02
    assert pooled["accuracy"] > 0.99  # here the grid is the truth as well
    assert found.maps[0]["redundancy"] < 0.1
    assert found.pointing == []
    assert set(found.curves) == {"deletion, tokens", "insertion, tokens", "deletion, random", "insertion, random"}
    assert len(found.curves["deletion, tokens"]["share"]) == 17


def test_it_is_written_as_page_chart_and_json(folders, tmp_path):
    page = score(folders, Quarters(), size=64, limit=1, out=tmp_path / "out")
    text = (tmp_path / "out" / "scores.html").read_text()
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["pictures"] == page.pictures == 1
    assert Image.open(tmp_path / "out" / "scores.png").width > 400
    assert "<svg" in text
    assert "currentColor" in text
    assert "Tokens as superpixels" in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "<metadata" not in text  # nor notes on where and when it was drawn


def test_pointing_goes_by_the_boxes():
    """Boxes around the first quarter: the important token lies in it, all tokens together are even."""
    picture = Image.fromarray(np.full((64, 64, 3), 255, np.uint8))
    sample = Sample("a", picture, None, np.array([[0.0, 0, 32, 32]]))
    found = score([sample], Quarters(), size=64)
    rows = {row["by"]: row for row in found.pointing}
    assert rows["all tokens"]["energy"] == pytest.approx(0.25, abs=0.01)
    assert rows["important tokens"]["energy"] > 0.9
    assert rows["important tokens"]["hit"] == 1
    assert rows["important tokens"]["chance"] == 0.25


def test_saliency_weighs_the_tokens():
    values = saliency(step(quadrants(4), (16, 16)), torch.tensor([0.0, 0, 0, 2.0]), (16, 16))
    assert values.sum() == pytest.approx(2)
    assert divmod(int(values.argmax()), 16) >= (8, 8)
    assert values[:6, :6].sum() == 0


def test_folders_are_paired_and_unknown_pixels_marked(folders):
    entries = list(read_labelled(folders))
    assert [entry.name for entry in entries] == ["0.jpg", "1.jpg", "2.jpg"]
    last = entries[2].read()
    assert (last.mask[:5] == IGNORE).all()
    assert (last.mask[5:] == quarters()[5:]).all()


def test_the_embedded_scenes_have_objects_and_boxes():
    sample = next(iter(read_labelled("scenes"))).read()
    assert sample.picture.size == (128, 128)
    for number, (x0, y0, x1, y1) in enumerate(sample.boxes):
        rows, columns = np.where(sample.mask == number + 1)
        assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x0, y0, x1, y1)


def test_one_bad_picture_is_left_out_and_named(folders):
    (folders / "annotations" / "val" / "1.png").unlink()
    Image.fromarray(quarters(10, 10)).save(folders / "annotations" / "val" / "2.png")
    found = score(folders, Quarters(), size=64)
    assert found.pictures == 1
    assert "has no mask" in found.skipped["1.jpg"]
    assert "is (10, 10), its image (48, 64)" in found.skipped["2.jpg"]


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such data"):
        read_labelled(tmp_path / "nothing")
    with pytest.raises(ValueError, match="needs a folder images/ and one of annotations/"):
        read_labelled(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a COCO file"):
        read_labelled(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_labelled(tmp_path / "b.json")
    (tmp_path / "c.txt").write_text("{")
    with pytest.raises(ValueError, match="expected a Parquet file, a COCO JSON"):
        read_labelled(tmp_path / "c.txt")
    with pytest.raises(ValueError, match="nothing to score"):
        score([], Quarters())


def test_coco_boxes_and_masks(tmp_path):
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
    with pytest.raises(ValueError, match=r"names a\.jpg, which is not in any of"):
        next(iter(read_labelled(path))).read()


def test_parquet_of_masks_and_of_objects(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import io

    def encoded(array):
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    picture, mask = RANDOM.integers(0, 255, (12, 16, 3), np.uint8), quarters(12, 16)
    mask[0] = 255
    parquet.write_table(
        arrow.table({"image": [encoded(picture)], "annotation": [encoded(mask)]}), tmp_path / "masks.parquet"
    )
    sample = next(iter(read_labelled(tmp_path / "masks.parquet"))).read()
    assert (np.array(sample.picture) == picture).all()
    assert (sample.mask[0] == IGNORE).all()
    instances = np.full((12, 16), 255, np.uint16)  # the 255th object is an object
    table = {
        "image": [encoded(picture)],
        "instance_mask": [encoded(instances)],
        "objects": [{"bbox": [[1.0, 2, 3, 4]]}],
    }
    parquet.write_table(arrow.table(table), tmp_path / "objects.parquet")
    sample = next(iter(read_labelled(tmp_path / "objects.parquet"))).read()
    assert (sample.mask == 255).all()
    assert sample.boxes.tolist() == [[1, 2, 4, 6]]
    parquet.write_table(arrow.table({"image": [encoded(picture)], "label": [1]}), tmp_path / "labels.parquet")
    with pytest.raises(ValueError, match="needs a column image, and annotation"):
        next(iter(read_labelled(tmp_path / "labels.parquet")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_every_family_is_scored(name, folders):
    found = score(folders, name, limit=2)
    assert found.superpixels
    assert all(0 <= row["accuracy"] <= 1 for row in found.superpixels)
    assert all(0 <= row["redundancy"] <= 1 for row in found.maps)
