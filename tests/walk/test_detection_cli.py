"""Detection from the command line: train, eval, predict, explain."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from saccade.data.synthetic.scenes import SceneObjects
from tests.engine.tasks.test_detect import REGIONS, SMALL, TINY
from tests.walk.test_cli import run

EVAL = ["--data", "scenes", "--split", "val", "--set", "scenes=16", "--workers", "0", "--device", "cpu"]


def train(out, name: str, head: str, *changes: str):
    """Train for one epoch with `saccade train`."""
    from saccade.cli import main

    settings = [word for change in (*SMALL[2:], "epochs=1", "data.scenes=8", *changes) for word in ("--set", change)]
    assert (
        main(["train", "--model", name, "--head", head, *settings, "--out", str(out), "--quiet", "--device", "cpu"])
        == 0
    )
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train(tmp_path_factory.mktemp("walk") / "regions", "svit_nano", "mask_rcnn", TINY, REGIONS)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    options = "model.head_kwargs={num_tokens: 16, detect_tokens: 9, min_size: 48, max_size: 96}"
    out = tmp_path_factory.mktemp("walk") / "sparse"
    return train(out, "sparseformer_nano", "sparse", "task=detection", options, "data.max_detections=5")


@pytest.fixture
def image(tmp_path):
    SceneObjects(1, 64).read(0).resize((80, 60)).save(tmp_path / "scene.png")
    return tmp_path / "scene.png"


def test_train_writes_weights_result_and_report(folder):
    assert {"last.safetensors", "result.json", "report.html", "metrics.csv"} <= {file.name for file in folder.iterdir()}
    final = json.loads((folder / "result.json").read_text())["final"]
    assert {"box_ap", "box_ap50", "mask_ap"} <= final.keys()


def test_eval_prints_coco_metrics_of_boxes_and_masks(capsys, folder, sparse):
    code, out, _ = run(capsys, "eval", str(folder), *EVAL)
    assert code == 0
    for word in ("AP50", "AP75", "AP small", "AR", "box", "mask", "100 detections", "worst classes"):
        assert word in out
    code, out, _ = run(capsys, "eval", str(sparse), *EVAL, "--max-detections", "7")
    assert code == 0
    assert "mask" not in out
    assert "7 detections" in out
    code, out, _ = run(capsys, "eval", str(sparse), *EVAL)
    assert "% at 5 detections" in out  # from the recipe next to the weights


def test_eval_writes_coco_result_files(capsys, folder, tmp_path):
    code, out, _ = run(capsys, "eval", str(folder), *EVAL, "--out", str(tmp_path), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["task"] == "detection"
    assert document["count"] == 10
    assert list(document["per_class"])[:2] == ["disc", "square"]
    assert 0 <= document["box_ap"] <= document["box_ap50"] <= 100
    assert json.loads((tmp_path / "evaluation.json").read_text()) == document
    boxes, masks = (json.loads((tmp_path / f"detections.{kind}.json").read_text()) for kind in ("bbox", "segm"))
    assert document["results"] == [str(tmp_path / f"detections.{kind}.json") for kind in ("bbox", "segm")]
    assert len(boxes) == len(masks) > 0
    assert {entry["image_id"] for entry in boxes} <= set(range(1, 11))
    assert boxes[0].keys() == {"image_id", "category_id", "score", "bbox"}
    assert masks[0].keys() == {"image_id", "category_id", "score", "segmentation"}
    assert masks[0]["segmentation"]["size"] == [48, 48]


def test_predict_writes_overlay_and_json(capsys, folder, image, tmp_path):
    out = tmp_path / "out"
    common = ("--device", "cpu", "--out", str(out))
    code, text, err = run(capsys, "predict", str(folder), str(image), "--threshold", "0.01", *common)
    assert (code, err) == (0, "")
    assert "scene_objects.png" in text
    (entry,) = json.loads((out / "predictions.json").read_text())["predictions"]
    drawn = Image.open(out / entry["overlay"])
    assert drawn.size == tuple(entry["size"]) == (80, 60)
    assert not np.array_equal(np.asarray(drawn), np.asarray(Image.open(image).convert("RGB")))
    scores = [one["score"] for one in entry["objects"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] >= 0.01
    for one in entry["objects"]:
        x0, y0, x1, y1 = one["box"]
        assert 0 <= x0 < x1 <= 80
        assert 0 <= y0 < y1 <= 60
        assert one["name"] == SceneObjects.classes[one["label"] - 1]
        assert coco_mask.decode(one["segmentation"]).shape == (60, 80)
    code, text, _ = run(capsys, "predict", str(folder), str(image), "--threshold", "1", "--device", "cpu")
    assert code == 0
    assert "no objects" in text


def test_predict_without_masks(capsys, sparse, image):
    code, out, _ = run(capsys, "predict", str(sparse), str(image), "--threshold", "0", "--device", "cpu", "--json")
    assert code == 0
    (entry,) = json.loads(out)["predictions"]
    assert 0 < len(entry["objects"]) <= 9
    assert "segmentation" not in entry["objects"][0]


@pytest.mark.parametrize(("detector", "steps"), [("folder", "stages.0.blocks.0"), ("sparse", "focus.blocks.0")])
def test_explain_draws_tokens_and_detections(capsys, request, image, tmp_path, detector, steps):
    model = str(request.getfixturevalue(detector))
    capsys.readouterr()  # discard what the fixture's training printed
    out = str(tmp_path / "page")
    code, text, _ = run(capsys, "explain", str(image), "--model", model, "--out", out, "--device", "cpu", "--json")
    assert code == 0
    (entry,) = json.loads(text)["images"]
    assert entry["steps"][0]["name"] == steps
    assert {"detections", "mosaic"} <= set(entry["figures"])
    assert (tmp_path / "page" / "scene" / "detections.png").is_file()
    assert "<h3>Detections</h3>" in (tmp_path / "page" / "report.html").read_text()


def test_explain_rejects_settings_for_a_detector(capsys, folder, image):
    code, _, err = run(capsys, "explain", str(image), "--model", str(folder), "--set", "drop_path_rate=0.1")
    assert code == 2
    assert "expected no model options for the detection model" in err


def test_eval_rejects_unknown_settings_and_zero_detections(capsys, sparse):
    code, _, err = run(capsys, "eval", str(sparse), *EVAL, "--set", "scene=8")
    assert code == 2
    assert "Did you mean scenes?" in err
    code, _, err = run(capsys, "eval", str(sparse), *EVAL, "--max-detections", "0")
    assert code == 2
    assert "argument --max-detections: expected an integer of at least 1, got 0." in err
