"""`saccade.explain`, from images to files."""

import json
import re

import numpy as np
import pytest
import torch

import saccade
from saccade.data.decode.image import read_image
from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.explain import explain

FIGURES = {
    "svit_nano": {"mosaic", "super_tokens", "anchor", "tokens", "relations"},
    "paca_nano": {"mosaic", "assignment-3", "clusters", "tokens", "relations"},
    "vt_nano": {"mosaic", "assignment-1", "assignment-2", "tokens", "relations"},
    "sparseformer_nano": {"mosaic", "sampling", "responses", "perturbed", "tokens", "relations"},
}


def test_explain_is_callable_from_the_package(cat):
    explanation = saccade.explain(cat, "svit_nano", importance=())
    assert explanation[0].name == explanation["cat.jpg"].name == "cat.jpg"
    assert len(explanation) == 1
    assert repr(explanation) == "Explanation(svit_nano: cat.jpg)"
    assert re.fullmatch(r"ImageExplanation\(cat.jpg: .+ \d+\.\d %, 5 figures, \d+ arrays\)", repr(explanation[0]))


def test_figures_are_tested_for_every_image_family():
    videos = {"video_sparseformer_nano"}  # test_clip_explanation.py
    assert set(saccade.list_models("*_nano")) == set(FIGURES) | videos


@pytest.mark.parametrize("name", FIGURES)
def test_family_has_its_figures_and_arrays(name, cat, tmp_path):
    image = explain(cat, name, out=tmp_path, importance=("gradient",))[0]
    assert set(image.figures) == FIGURES[name]
    assert image.notes == []
    for figure in image.figures.values():
        assert name in figure.caption
        assert re.search(r"\d+ (of \d+ )?(super )?tokens", figure.caption + figure.panels[-1].note)
        assert (tmp_path / "cat" / f"{figure.name}.png").stat().st_size > 1000
        assert {(panel.image.dtype, panel.image.ndim) for panel in figure.panels} == {(np.dtype(np.uint8), 3)}
    height, width = image.arrays["image"].shape[:2]
    for step in image.steps:
        key = step["name"] + (f".{step['step']}" if step["step"] else "")
        assert image.arrays[f"maps/{key}"].shape == (step["tokens"], *step["grid"])
        assert image.arrays[f"importance/gradient/{key}"].shape == (step["tokens"],)
        assert image.arrays[f"labels/{key}"].shape == image.arrays[f"dominance/{key}"].shape == (height, width)
    document = json.loads((tmp_path / "explanation.json").read_text())
    assert document["model"] == name
    (entry,) = document["images"]
    assert [prediction["class"] for prediction in entry["predictions"]] == [name for name, _ in image.predictions]
    assert set(entry["figures"]) == FIGURES[name]


def test_save_writes_arrays_on_request(cat, tmp_path):
    explanation = explain(cat, "svit_nano", importance=())
    explanation.save(tmp_path, arrays=True)
    with np.load(tmp_path / "cat" / "arrays.npz") as arrays:
        assert set(arrays.files) == set(explanation[0].arrays)


def test_unreadable_images_are_skipped(cat, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    explanation = explain([tmp_path / "text.png", cat, tmp_path / "missing.jpg"], "svit_nano", importance=())
    assert [image.name for image in explanation.images] == ["cat.jpg"]
    assert set(explanation.skipped) == {"text.png", "missing.jpg"}
    assert "missing.jpg" in explanation.html()


def test_explain_needs_a_readable_image(tmp_path):
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(ValueError, match="expected a readable image, got none"):
        explain([tmp_path / "text.png", tmp_path / "missing.jpg"], "svit_nano")
    with pytest.raises(ValueError, match="no such file"):
        explain(tmp_path / "missing.jpg", "svit_nano")
    with pytest.raises(ValueError, match="expected at least one image"):
        explain([], "svit_nano")


def test_invalid_keywords_are_refused(cat):
    with pytest.raises(ValueError, match="expected importance of gradient, occlusion, got 'magic'"):
        explain(cat, "svit_nano", importance=("magic",))
    with pytest.raises(ValueError, match=r"expected anchor x, y in \[0, 1\], got \(3, 0\.5\)"):
        explain(cat, "svit_nano", anchor=(3, 0.5))


@pytest.mark.parametrize(("old", "new"), [("most", "max_tokens"), ("tell", "on_progress")])
def test_renamed_keywords_are_errors_that_name_the_new_one(old, new, cat):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{old}'. Use {new}=."):
        saccade.explain(cat, "svit_nano", **{old: 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        saccade.explain(cat, "svit_nano", colour=3)


def test_progress_is_reported_per_image(cat):
    lines = []
    explain([cat, photo_paths()["clock"]], "svit_nano", importance=(), on_progress=lines.append)
    assert lines == ["cat.jpg: 1 of 2", "clock.jpg: 2 of 2"]


def test_same_seed_gives_the_same_figures(cat):
    first, second, other = (explain(cat, "svit_nano", seed=seed, importance=())[0] for seed in (5, 5, 6))
    assert all(np.array_equal(first.arrays[key], second.arrays[key]) for key in first.arrays)
    assert first.figures["mosaic"]._repr_png_() == second.figures["mosaic"]._repr_png_()
    key = "maps/stages.0.blocks.0"
    assert not np.array_equal(first.arrays[key], other.arrays[key])


def test_max_tokens_limits_the_gallery(cat):
    few, every = (explain(cat, "svit_nano", importance=(), all_tokens=flag, max_tokens=5)[0] for flag in (False, True))
    assert len(few.figures["tokens"].panels) == 5
    assert len(every.figures["tokens"].panels) == every.steps[-1]["tokens"]


@pytest.mark.parametrize("photo", ["rocket", "coffee", "cat"])
def test_explained_image_is_what_predict_classifies(photo):
    """Landscape and portrait photographs: same probabilities by both functions."""
    torch.manual_seed(0)
    model = saccade.create_model("svit_nano", num_classes=9).eval()
    explanation = saccade.explain(photo_paths()[photo], model, importance=())[0]
    prediction = saccade.predict(model, photo_paths()[photo])[0]
    assert [name for name, _ in explanation.predictions] == [f"class {c.index}" for c in prediction.classes]
    values = [probability for _, probability in explanation.predictions]
    assert values == pytest.approx([c.probability for c in prediction.classes], abs=1e-6)
    full = saccade.explain(photo_paths()[photo], model, importance=(), full_image=True)[0]
    height, width = full.arrays["image"].shape[:2]
    image = read_image(photo_paths()[photo])
    assert (height > width) == (image.height > image.width)
    assert explanation.arrays["image"].shape[:2] == (64, 64)
