"""`saccade.evaluate`: which images are evaluated, and what is refused."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.engine.evaluate import open_evaluation_data, recipe_of
from saccade.engine.recipe import Recipe, to_yaml
from saccade.models.card import Card, Preprocess, save_model
from saccade.tasks.load import card_of


def class_folder(path, splits=("",), per_class=10):
    """Red and blue images, each of its own shade."""
    for split in splits:
        for label, channel in (("blue", 2), ("red", 0)):
            folder = path / split / label
            folder.mkdir(parents=True)
            for i in range(per_class):
                pixels = np.zeros((32, 32, 3), np.uint8)
                pixels[..., channel] = 100 + i
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return path


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was trained on tmp_path/data, without training."""
    torch.manual_seed(0)
    model = saccade.create_model("vt_nano", num_classes=2)
    card = Card("vt_nano", 2, {}, ["blue", "red"], Preprocess(32))
    (tmp_path / "run").mkdir()
    save_model(model, tmp_path / "run" / "best.safetensors", card)
    recipe = Recipe(seed=3)
    recipe.data.path, recipe.data.val_fraction = str(tmp_path / "data"), 0.2
    (tmp_path / "run" / "recipe.yaml").write_text(to_yaml(recipe))
    return tmp_path / "run"


def opened(run, data, split=None):
    model = saccade.load(run)
    return open_evaluation_data(card_of(model), data, split, recipe_of(model), {})


def test_held_out_part_of_the_training_data_is_evaluated(run, tmp_path):
    from saccade.data.open import open_train_and_val

    class_folder(tmp_path / "data")
    part = opened(run, tmp_path / "data")
    train, val = open_train_and_val(tmp_path / "data", None, 0.2, 3, size=32)
    assert (len(part.source), part.split, part.trained_on) == (4, "the 20% that training held out", False)
    names = {part.source.name(i) for i in range(4)}
    assert names == {val.name(i) for i in range(4)}
    assert not names & {train.name(i) for i in range(len(train))}


def test_parts_of_the_training_data_are_evaluated_by_name(run, tmp_path):
    class_folder(tmp_path / "data")
    train, val = opened(run, tmp_path / "data", "train"), opened(run, tmp_path / "data", "val")
    assert (len(train.source), train.split, train.trained_on) == (16, "the 80% that the model was trained on", True)
    assert (len(val.source), val.trained_on) == (4, False)
    names = {train.source.name(i) for i in range(16)}
    assert not names & {val.source.name(i) for i in range(4)}


def test_evaluation_split_is_preferred_and_training_split_is_marked(run, tmp_path):
    class_folder(tmp_path / "data", ("train", "val"), per_class=3)
    assert opened(run, tmp_path / "data")[1:] == ("val", False)
    assert opened(run, tmp_path / "data", "train")[1:] == ("train", True)


def test_other_data_is_evaluated_completely(run, tmp_path):
    class_folder(tmp_path / "other", per_class=2)
    part = opened(run, tmp_path / "other")
    assert (len(part.source), part.split, part.trained_on) == (4, "all", False)


def test_training_images_give_a_warning(run, tmp_path, caplog):
    class_folder(tmp_path / "data", per_class=5)
    with caplog.at_level(logging.WARNING):
        metrics = saccade.evaluate(run, tmp_path / "data", "all", workers=0)
    assert metrics["trained_on"] is True
    assert (metrics["count"], metrics["split"]) == (10, "all")
    assert "the model was trained on these images" in caplog.text


def test_metrics_match_predictions(run, tmp_path):
    data = class_folder(tmp_path / "other", per_class=4)
    progress = []
    metrics = saccade.evaluate(run, data, workers=0, batch_size=3, on_progress=lambda *done: progress.append(done))
    predictions = saccade.predict(run, data)
    correct = sum(prediction.label == prediction.source.parent.name for prediction in predictions)
    assert metrics["top1"] == pytest.approx(100 * correct / 8)
    assert progress == [(3, 8), (6, 8), (8, 8)]
    assert set(metrics["per_class"]) == {"blue", "red"}


def test_limit_is_balanced(run, tmp_path):
    data = class_folder(tmp_path / "other", per_class=4)
    assert saccade.evaluate(run, data, workers=0, limit=4)["count"] == 4


def test_options_that_do_not_apply_are_refused(run, tmp_path):
    data = class_folder(tmp_path / "other", per_class=1)
    with pytest.raises(ValueError, match="scales applies to segmentation, not to classification"):
        saccade.evaluate(run, data, scales=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"unknown data option image_colum\. Did you mean image_column"):
        saccade.evaluate(run, data, data_options={"image_colum": "x"})
    with pytest.raises(TypeError, match="sizes"):
        saccade.evaluate(run, data, sizes=64)
