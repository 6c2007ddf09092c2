"""Multi-label training, from lists of labels to predictions."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.cli import main
from saccade.engine.recipe import RecipeError, load_recipe
from saccade.engine.train import assemble, train
from saccade.explanation import inspect_image, load_subject
from saccade.inference.export import export_model
from saccade.inference.onnx_predict import OnnxModel
from saccade.inference.rows import RowPredictor
from saccade.tasks.predict import PredictOptions
from tests.data.image_files import write_folder
from tests.engine.runs import TINY, rows

COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}
TRAINED = ["data.image_size=32", "data.workers=0", "trainer.accelerator=cpu", "trainer.log_every=1", "batch_size=16",
           "epochs=12", "optimizer.lr=3e-3", "augment.crop=none", "schedule.warmup_epochs=0"]  # fmt: skip


def write_squares(folder, count=120, seed=0):
    """Grey images with a square of every colour in `labels`, which are independent of each other; 1 of 8 has none."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = []
    for index in range(count):
        image = rng.integers(90, 130, (32, 32, 3)).astype(np.uint8)
        labels = [name for number, name in enumerate(COLOURS) if index >> number & 1]
        for name in labels:
            y, x = rng.integers(0, 24, 2)
            image[y : y + 8, x : x + 8] = COLOURS[name]
        Image.fromarray(image).save(folder / f"{index}.png")
        lines.append(json.dumps({"file": f"{index}.png", "labels": labels}))
    (folder / "labels.jsonl").write_text("\n".join(lines))
    return folder


def recipe(path, *changes):
    return load_recipe(None, [TINY, *TRAINED, f"data.path={path}", *changes])


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return write_squares(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def finished(squares, tmp_path_factory):
    return train(recipe(squares, "data.val_fraction=0.25"), tmp_path_factory.mktemp("run"), progress=False)


def test_training_ranks_labels_better_than_chance(finished):
    """Half of the images have each label, so a random ranking has an mAP of about 50 %."""
    assert finished.result["score"] == "map"
    assert finished.metrics["map"] > 1.5 * 50
    assert load_recipe(finished.out / "recipe.yaml").data.multi_label is True
    best = max(float(row["val_map"]) for row in rows(finished.out) if row["val_map"])
    assert finished.result["best"]["map"] == pytest.approx(best, abs=1e-3)


def test_evaluation_equals_validation_of_the_saved_weights(finished, squares):
    metrics = saccade.evaluate(finished.out, squares, workers=0)
    assert metrics["count"] == 30
    for name in ("loss", "map", "f1"):
        assert metrics[name] == pytest.approx(finished.metrics[name], abs=1e-3)
        assert metrics[name] == pytest.approx(finished.result["best"][name], abs=1e-3)
    assert list(metrics["per_class"]) == ["blue", "green", "red"]
    assert np.mean(list(metrics["per_class"].values())) == pytest.approx(metrics["map"], abs=0.01)


def test_predictions_are_the_trained_labels(finished, squares):
    model = saccade.load(finished.out)
    assert model.card.multi_label
    images = [squares / f"{index}.png" for index in range(32)]
    predictions = saccade.predict(model, images, threshold=0.5)
    hits = [
        (name in prediction.labels) == bool(index >> number & 1)
        for index, prediction in enumerate(predictions)
        for number, name in enumerate(COLOURS)
    ]
    assert np.mean(hits) > 1.5 * 0.5
    assert max(sum(prediction.probabilities) for prediction in predictions) > 1.2, "probabilities are independent"


def test_report_lists_average_precision_and_labels(finished):
    page = (finished.out / "report.html").read_text()
    assert "mAP" in page
    assert "Average precision" in page
    assert "true: blue, green" in page


def test_auto_selection_is_said_once(squares, caplog):
    with caplog.at_level(logging.WARNING):
        setup = assemble(recipe(squares))
    assert [record.message for record in caplog.records if "multi-label" in record.message] == [
        "the labels are lists: training a multi-label model, with binary cross-entropy and mAP."
    ]
    assert setup.card.multi_label
    assert setup.sources.train_memory.labels.dtype == torch.float32
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assemble(recipe(squares, "data.multi_label=true"))
    assert not caplog.records


@pytest.mark.parametrize(
    "changes",
    [
        ["augment.mixup=0.8", "augment.cutmix=1.0", "regularize.class_weights=balanced", "trainer.accumulate=2"],
        ["regularize.focal_gamma=2.0", "regularize.class_weights=[1, 2, 3]", "data.cache=false", "data.workers=1"],
    ],
)
def test_options_of_the_loss_and_the_data(squares, tmp_path, changes):
    run = train(recipe(squares, "epochs=1", "data.limit=32", *changes), tmp_path, progress=False)
    assert np.isfinite([float(row["train_loss"]) for row in rows(tmp_path) if row["train_loss"]]).all()
    assert 0 < run.metrics["map"] <= 100
    assert run.result["train_images"] == 32


def test_single_labels_become_multi_hot_on_request(tmp_path):
    setup = assemble(recipe(write_folder(tmp_path, {"a": 6, "b": 6}), "data.multi_label=true"))
    assert setup.card.multi_label
    assert setup.sources.train.labels.sum(1).tolist() == [1] * 11


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["regularize.label_smoothing=0.1"], "label_smoothing: expected one label per image, got lists of labels"),
        (["distill.teacher=vt_nano"], "distill.teacher: expected one label per image"),
        (
            ["data.multi_label=false"],
            "expected one label per image, got 0 for .*0.png .*leave out data.multi_label=false",
        ),
        (["regularize.class_weights=[1, 2]"], "expected 3 values in regularize.class_weights, got 2"),
        (["regularize.dice=1"], r"regularize\.dice is for segmentation, got task classification"),
        (
            ["task=segmentation", "model.head=paca", "data.multi_label=true"],
            "multi_label is for classification and video",
        ),
        (
            ["distill.features=true", "data.multi_label=true"],
            "multi_label is for classification and video, got distill",
        ),
    ],
)
def test_unsupported_options_are_refused(squares, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(recipe(squares, *changes), tmp_path, progress=False)
    assert issubclass(RecipeError, ValueError)


def test_single_label_model_refuses_lists(squares):
    model = saccade.create_model("vt_nano", num_classes=3)
    with pytest.raises(ValueError, match="expected one label per image, got 0"):
        saccade.evaluate(model, squares, workers=0)
    with pytest.raises(ValueError, match="unknown data option multi_label"):
        saccade.evaluate(model, squares, workers=0, data_options={"multi_label": True})


def test_explanation_has_independent_probabilities(finished, squares):
    prediction = saccade.predict(finished.out, squares / "7.png")[0]
    inspection = inspect_image(load_subject(finished.out), Image.open(squares / "7.png"))
    assert dict(inspection.predictions) == pytest.approx({c.name: c.probability for c in prediction.classes}, abs=1e-4)
    assert replace(inspection, predictions=[("red", 0.49)]).doubt.startswith(
        "Uncertain: the most probable class has 49%"
    )
    assert replace(inspection, predictions=[("red", 0.51)]).doubt == ""


def test_rows_of_batch_prediction_have_the_labels(finished, squares):
    model = saccade.load(finished.out)
    engine = RowPredictor(model, "classify", PredictOptions(threshold=0.0))
    (row,) = engine([engine.read(squares / "7.png")])
    assert row.values["labels"] == ["blue", "green", "red"]
    assert "labels" in engine.schema.names


@pytest.mark.slow
def test_exported_model_gives_labels(finished, squares, tmp_path):
    model = saccade.load(finished.out)
    metadata = export_model(model, tmp_path / "model.onnx").metadata
    assert metadata["multi_label"] is True
    prediction, image = saccade.predict(model, squares / "7.png")[0], Image.open(squares / "7.png")
    result = OnnxModel(tmp_path / "model.onnx").classify(image)
    assert result["labels"] == prediction.labels
    scores = [entry["probability"] for entry in result["classes"]]
    assert scores == pytest.approx([c.probability for c in prediction.classes], abs=1e-3)


def test_command_line_prints_metrics_and_labels(finished, squares, capsys):
    assert main(["eval", str(finished.out), "--data", str(squares), "--workers", "0"]) == 0
    text = capsys.readouterr().out
    assert "mAP %" in text
    assert "AP %" in text
    assert main(["predict", str(finished.out), str(squares / "0.png"), "--threshold", "1"]) == 0
    assert "0.png: no label (" in capsys.readouterr().out
