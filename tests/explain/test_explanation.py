"""`saccade.explain` from pictures to files."""

import base64
import inspect
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.data.photos import photo_paths
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.explanation import explain

FAMILIES = {
    "svit_nano": {"mosaic", "super_tokens", "anchor", "tokens", "relations"},
    "paca_nano": {"mosaic", "assignment-3", "clusters", "tokens", "relations"},
    "vt_nano": {"mosaic", "assignment-1", "assignment-2", "tokens", "relations"},
    "sparseformer_nano": {"mosaic", "looking", "responding", "disturbed", "tokens", "relations"},
}


@pytest.fixture(scope="module")
def cat():
    return photo_paths()["cat"]


def test_the_package_is_a_function_too(cat):
    assert callable(saccade.explain)
    assert saccade.explain.hooks.record.record is saccade.record
    import saccade.explain.figures.mosaic as mosaic

    assert inspect.ismodule(mosaic)
    found = saccade.explain(cat, "svit_nano", importance=())
    assert found[0].name == found["cat.jpg"].name == "cat.jpg"
    assert len(found) == 1


def test_every_family_is_here():
    clips = {"video_sparseformer_nano"}  # test_tubes.py
    assert set(saccade.list_models("*_nano")) == set(FAMILIES) | clips


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_figures(name, cat, tmp_path):
    found = explain(cat, name, out=tmp_path, importance=("gradient",))
    image = found[0]
    assert set(image.figures) == FAMILIES[name]
    assert image.notes == []
    for figure in image.figures.values():
        assert name in figure.caption
        assert re.search(r"\d+ (of \d+ )?(super )?tokens", figure.caption + figure.panels[-1].note)
        assert (tmp_path / "cat" / f"{figure.name}.png").stat().st_size > 1000
        for panel in figure.panels:
            assert panel.picture.dtype == np.uint8
            assert panel.picture.ndim == 3
    height, width = image.arrays["image"].shape[:2]
    for step in image.steps:
        key = step["name"] + (f".{step['step']}" if step["step"] else "")
        assert image.arrays[f"maps/{key}"].shape == (step["tokens"], *step["grid"])
        assert image.arrays[f"importance/gradient/{key}"].shape == (step["tokens"],)
        assert image.arrays[f"labels/{key}"].shape == (height, width)
    assert json.loads((tmp_path / "explanation.json").read_text())["model"] == name


def test_the_page_needs_nothing_else(cat, tmp_path):
    found = explain([cat, photo_paths()["clock"]], "svit_nano", out=tmp_path, importance=())
    text = (tmp_path / "report.html").read_text()
    assert text == found.html()
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert "These weights are fresh" in text
    assert 'href="#image-1"' in text
    pictures = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', text)
    assert len(pictures) == 2 + sum(len(f.panels) for image in found.images for f in image.figures.values())
    for kind, data in pictures[:5]:
        assert Image.open(io.BytesIO(base64.b64decode(data))).format == kind.upper()
    assert found._repr_html_().startswith("<style>")
    assert "<main>" in found._repr_html_()


def test_hostile_names_are_shown_as_text(tmp_path):
    path = tmp_path / "<img src=x onerror=alert(1)>.png"
    Image.new("RGB", (40, 40)).save(path)
    text = explain(path, "svit_nano", importance=()).html()
    assert "<img src=x" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in text


def test_bad_pictures_among_good_ones_are_left_out(cat, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    found = explain([tmp_path / "text.png", cat, tmp_path / "gone.jpg"], "svit_nano", importance=())
    assert [image.name for image in found.images] == ["cat.jpg"]
    assert set(found.skipped) == {"text.png", "gone.jpg"}
    assert "gone.jpg" in found.html()
    with pytest.raises(ValueError, match="none of the images can be read"):
        explain([tmp_path / "text.png", tmp_path / "gone.jpg"], "svit_nano")
    with pytest.raises(ValueError, match="no such image"):
        explain(tmp_path / "gone.jpg", "svit_nano")
    with pytest.raises(ValueError, match="no images to explain"):
        explain([], "svit_nano")


def test_a_checkpoint_is_recognised(cat, tmp_path):
    torch.manual_seed(3)
    model = saccade.create_model("svit_nano", num_classes=7)
    path = tmp_path / "svit_nano.safetensors"  # a file, though it begins like a name
    saccade.save_checkpoint(model, path)
    found = explain(cat, path, importance=())
    assert (found.model, found.weights, found.trained) == ("svit_nano", "svit_nano.safetensors", True)
    direct = explain(cat, model, importance=())
    assert found[0].answers == direct[0].answers
    assert len(found[0].answers) == 5
    assert found[0].answers[0][0].startswith("class ")


def test_a_checkpoint_may_say_what_it_is(cat, tmp_path):
    """Options, class names and preprocessing come from the file's own notes."""
    model = saccade.create_model("svit_nano", num_classes=3, super_token=(2, 2, 1, 1))
    notes = {
        "saccade.kwargs": '{"super_token": [2, 2, 1, 1]}',
        "saccade.classes": '["cat", "dog", "cup"]',
        "saccade.preprocess": '{"size": 96, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}',
    }
    saccade.save_checkpoint(model, tmp_path / "mine.safetensors", notes)
    found = explain(np.zeros((50, 50, 3), np.uint8), tmp_path / "mine.safetensors", importance=())[0]
    assert {name for name, _ in found.answers} == {"cat", "dog", "cup"}
    assert found.steps[0]["grid"] == [24, 24]
    assert found.steps[0]["tokens"] == 144


def test_what_cannot_be_explained_is_named(cat, tmp_path):
    torch.save({"fc.weight": torch.zeros(3, 3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="no registered model has the tensors of this checkpoint"):
        explain(cat, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="no such checkpoint"):
        explain(cat, tmp_path / "gone.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="damaged or incomplete"):
        explain(cat, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="Did you mean 'svit_nano'"):
        explain(cat, "svit_nan")
    with pytest.raises(ValueError, match="has no step that reports tokens"):
        explain(cat, torch.nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match="importance knows gradient and occlusion"):
        explain(cat, "svit_nano", importance=("magic",))
    with pytest.raises(ValueError, match="anchor is x, y in units of the picture"):
        explain(cat, "svit_nano", anchor=(3, 0.5))


def test_the_target_is_a_number_or_a_name(cat):
    labels = [f"thing {i}" for i in range(10)]
    model = saccade.create_model("svit_nano", num_classes=10)
    assert explain(cat, model, target=4, labels=labels, importance=())[0].target == "thing 4"
    assert explain(cat, model, target="thing 6", labels=labels, importance=())[0].target == "thing 6"
    assert explain(cat, model, target="7", labels=labels, importance=())[0].target == "thing 7"
    with pytest.raises(ValueError, match="class 12 does not exist: this model has 10"):
        explain(cat, model, target=12)
    with pytest.raises(ValueError, match="knows no class 'tiger'"):
        explain(cat, model, target="tiger")


def test_a_model_without_classes_is_drawn_without_importance(cat):
    model = saccade.create_model("svit_nano", num_classes=0)
    found = explain(cat, model)[0]
    assert "mosaic" in found.figures
    assert not any(key.startswith("importance/") for key in found.arrays)
    assert found.answers == []
    assert found.notes == ["No importance: this model was built without classes."]
    with pytest.raises(ValueError, match="built without classes"):
        explain(cat, model, target=3)


def test_maps_of_a_large_picture_are_not_kept(cat, monkeypatch):
    monkeypatch.setattr("saccade.explain.image_explanation.LARGEST", 200)
    found = explain(cat, "svit_nano", importance=())[0]
    assert not any(key.startswith("maps/") for key in found.arrays)
    assert found.notes[0].startswith("Maps too large to keep as arrays: stages.0.blocks.0, stages.1.blocks.0")


def test_one_pixel_and_one_channel():
    found = explain(np.full((1, 1, 3), 77, np.uint8), saccade.create_model("svit_nano", in_chans=1), importance=())
    assert "mosaic" in found[0].figures
    with pytest.raises(ValueError, match="takes 5 channels"):
        explain(np.zeros((9, 9, 3), np.uint8), saccade.create_model("svit_nano", in_chans=5))


def test_the_same_seed_gives_the_same_pictures(cat):
    first, second = (explain(cat, "svit_nano", seed=5, importance=()) for _ in range(2))
    other = explain(cat, "svit_nano", seed=6, importance=())
    same = [np.array_equal(first[0].arrays[key], second[0].arrays[key]) for key in first[0].arrays]
    assert all(same)
    assert first[0].figures["mosaic"]._repr_png_() == second[0].figures["mosaic"]._repr_png_()
    key = "maps/stages.0.blocks.0"
    assert not np.array_equal(first[0].arrays[key], other[0].arrays[key])


def test_all_tokens_on_request(cat):
    few, every = (explain(cat, "svit_nano", importance=(), all_tokens=flag, most=5)[0] for flag in (False, True))
    assert len(few.figures["tokens"].panels) == 5
    assert len(every.figures["tokens"].panels) == every.steps[-1]["tokens"]


def test_occlusion_sorts_the_gallery(cat):
    image = explain(cat, "svit_nano")[0]
    values = image.arrays["importance/occlusion/stages.1.blocks.1"]
    shown = [int(panel.label.split()[1]) for panel in image.figures["tokens"].panels]
    assert shown == np.argsort(-values, kind="stable")[:12].tolist()
    assert image.figures["tokens"].panels[0].note.splitlines()[1] == f"occlusion {values.max():+.2g}"


def test_a_sheet_keeps_every_panel_and_its_text():
    picture = np.full((30, 40, 3), 9, np.uint8)
    panels = [Panel(picture, f"token {i}", "0.5", (200, 30, 30)) for i in range(5)]
    sheet = np.array(Figure("f", "A title", "A caption of some words", panels, columns=3).image()).astype(int)
    assert (sheet == 9).all(2).sum() == 5 * round(30 * 187 / 40) * 187  # panels enlarged to 187 px
    assert ((sheet == [200, 30, 30]).all(2).sum()) >= 5 * 100
    assert Image.open(io.BytesIO(Figure("f", "t", "c", panels)._repr_png_())).format == "PNG"
