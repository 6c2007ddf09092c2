"""Scores on labelled images."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from saccade.explanation.scores import score as module
from saccade.explanation.scores.ground_truth import Sample
from saccade.explanation.scores.score import rows_as_text, saliency, score
from tests.explanation.models import QuadrantModel
from tests.explanation.planted import quadrants, step
from tests.explanation.scores.folders import quarters


def test_tokens_equal_to_the_truth_are_perfect_superpixels(folders):
    scores = score(folders, QuadrantModel(), size=64)
    assert scores.images == 3
    tokens, slic, pooling = scores.superpixels
    assert [row["method"] for row in scores.superpixels] == ["tokens", "SLIC", "average pooling"]
    assert tokens["segments"] == pooling["segments"] == 4
    assert tokens["accuracy"] > 0.99
    assert tokens["recall"] > 0.95
    assert tokens["undersegmentation"] < 0.02
    assert pooling["accuracy"] > 0.99  # the truth is a grid
    assert slic["step"] == tokens["step"]
    assert list(scores.maps[0]) == ["step", "redundancy", "token_entropy", "pixel_entropy"]
    assert scores.maps[0]["redundancy"] == scores.maps[0]["pixel_entropy"] == 0
    assert scores.maps[0]["token_entropy"] == pytest.approx(np.log(256) / np.log(1024))
    assert scores.pointing == []
    assert set(scores.curves) == {"deletion, tokens", "insertion, tokens", "deletion, random", "insertion, random"}
    assert len(scores.curves["deletion, tokens"]["fraction"]) == 17


def test_random_order_shuffles_the_importances_of_the_same_maps(monkeypatch):
    rankings = []
    original = module.deletion

    def deletion(image, values, classify):
        rankings.append(values)
        return original(image, values, classify)

    monkeypatch.setattr(module, "deletion", deletion)
    score([Sample("a", Image.fromarray(np.full((64, 64, 3), 255, np.uint8)), None, None)], QuadrantModel(), size=64)
    tokens, shuffled = (set(values[16::32, 16::32].flatten().tolist()) for values in rankings)
    assert tokens == shuffled  # one value per quadrant
    assert not torch.equal(*rankings)


def test_pointing_weights_tokens_by_importance():
    """A box around the first quarter: the important token lies in it, all tokens together are uniform."""
    sample = Sample("a", Image.fromarray(np.full((64, 64, 3), 255, np.uint8)), None, np.array([[0.0, 0, 32, 32]]))
    scores = score([sample], QuadrantModel(), size=64)
    rows = {row["method"]: row for row in scores.pointing}
    assert rows["all tokens"]["energy"] == pytest.approx(0.25, abs=0.01)
    assert rows["important tokens"]["energy"] > 0.9
    assert rows["important tokens"]["hit"] == 1
    assert rows["important tokens"]["chance"] == 0.25


def test_boxes_and_masks_are_scaled_with_a_large_image():
    image = Image.fromarray(np.full((960, 1280, 3), 255, np.uint8))
    sample = Sample("large", image, quarters(960, 1280).astype(np.int32), np.array([[0.0, 0, 640, 480]]))
    scores = score([sample], QuadrantModel(), size=64)
    assert scores.superpixels[0]["accuracy"] > 0.99
    assert {row["chance"] for row in scores.pointing} == {0.25}


def test_saliency_weights_the_maps():
    values = saliency(step(quadrants(4), (16, 16)), torch.tensor([0.0, 0, 0, 2.0]), (16, 16))
    assert values.sum() == pytest.approx(2)
    assert divmod(int(values.argmax()), 16) >= (8, 8)
    assert values[:6, :6].sum() == 0


def test_bad_samples_are_skipped_and_named(folders):
    (folders / "annotations" / "val" / "1.png").write_bytes(b"")
    Image.fromarray(quarters(10, 10)).save(folders / "annotations" / "val" / "2.png")
    scores = score(folders, QuadrantModel(), size=64)
    assert scores.images == 1
    assert "1.png: the file is empty" in scores.skipped["1.jpg"]
    assert "the image is 64 x 48 px, its mask 10 x 10 px" in scores.skipped["2.jpg"]


def test_score_needs_an_image():
    with pytest.raises(ValueError, match="expected at least one labelled image"):
        score([], QuadrantModel())


def test_score_reports_progress(folders):
    lines = []
    score(folders, QuadrantModel(), size=64, limit=2, on_progress=lines.append)
    assert lines == ["0.jpg: 1 of at most 2", "1.jpg: 2 of at most 2"]


def test_rows_have_three_significant_digits():
    assert rows_as_text([{"step": "a", "recall": 0.12345}]) == [["step", "recall"], ["a", "0.123"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_every_family_is_scored(name, folders):
    scores = score(folders, name, limit=2)
    assert {row["method"] for row in scores.superpixels} == {"tokens", "SLIC", "average pooling"}
    assert all(0 <= row["accuracy"] <= 1 for row in scores.superpixels)
    assert all(0 <= row["redundancy"] <= 1 for row in scores.maps)


@pytest.mark.shows("SVIT-57")
@pytest.mark.parametrize(
    ("name", "options", "segments"),
    [
        ("vit_tiny_patch16_224", dict(img_size=64, depth=1), 16),
        ("vit_tiny_patch16_224", dict(dynamic_img_size=True, depth=1), 15),
        ("deit_tiny_distilled_patch16_224", dict(img_size=64, depth=1), 16),
        ("swin_tiny_patch4_window7_224", dict(img_size=56, depths=(1, 1), embed_dim=24, num_heads=(1, 2)), 196),
    ],
)
def test_vits_of_timm_are_baselines_of_every_score(name, options, segments):
    """Their tokens are patches: as superpixels a grid, disjoint maps of one cell each, gates that scale one patch."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **options).eval()
    image = Image.fromarray(np.full((64, 48, 3), 255, np.uint8))
    sample = Sample("a", image, quarters(64, 48).astype(np.int32), np.array([[0.0, 0, 24, 32]]))
    scores = score([sample], model, size=64 if "dynamic_img_size" in options else None)
    tokens = next(row for row in scores.superpixels if row["method"] == "tokens")
    assert tokens["step"] == "patch_embed"
    assert tokens["segments"] == segments
    assert tokens["accuracy"] > 0.7  # the truth has four parts
    assert scores.maps[0]["redundancy"] == pytest.approx(0, abs=1e-6)
    assert {row["method"] for row in scores.pointing} == {"all tokens", "important tokens"}
    assert set(scores.curves) == {"deletion, tokens", "insertion, tokens", "deletion, random", "insertion, random"}


def test_size_of_a_fixed_model_is_refused(folders):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    with pytest.raises(ValueError, match="expected squares of 64 px for vit_tiny_patch16_224, got 96 px"):
        score(folders, model, size=96)
