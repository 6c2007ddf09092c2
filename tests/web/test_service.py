"""Model catalogue, segmentation, cache and downloads, without Gradio."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.synthetic.photos import photo_paths
from saccade.tasks.open import open_task_model
from saccade.web import catalogue as catalogues
from saccade.web import fragments
from saccade.web import service as services
from saccade.web.catalogue import Catalogue, list_entries
from saccade.web.inspection import summarize
from saccade.web.segmentation import segment_image
from saccade.web.service import Service
from saccade.web.uploads import BadUpload, Limits
from tests.web.conftest import make_image
from tests.weights.folder import SHIPPED, load_tool, make_run, weights_in


def test_catalogue_without_weights_has_untrained_models(tmp_path):
    with weights_in(tmp_path):
        entries = list_entries()
    assert [(entry.name, entry.trained) for entry in entries] == [(name, False) for name in catalogues.FAMILIES]


def test_catalogue_lists_checkpoints_then_embedded_weights(tmp_path, segmenter):
    with weights_in(tmp_path / "weights"):
        load_tool().embed(make_run(tmp_path / "run"), "tiny_imagenet")
        with weights_in(tmp_path / "weights"):
            run = make_run(tmp_path / "mine")
            catalogue = Catalogue([str(run), str(segmenter), str(run / "best.safetensors")])
            assert catalogue.names() == ["mine", "best", "svit_nano.tiny_imagenet", *catalogues.FAMILIES[1:]]
            assert catalogue.names("segmentation") == ["streets"]
            embedded = catalogue.classifier("svit_nano.tiny_imagenet")
            assert (embedded.trained, embedded.labels[0], embedded.size) == (True, "tabby", 64)
            assert catalogue.classifier("svit_nano") is embedded  # the tag is optional
            assert not catalogue.classifier("paca_nano").trained
            with pytest.raises(ValueError, match="unknown model 'nonsense'"):
                catalogue.classifier("nonsense")
            with pytest.raises(ValueError, match="unknown model '/etc/passwd'"):
                catalogue.segmenter("/etc/passwd")
            assert list_entries(models=["svit_nano"])[0].trained
    with pytest.raises(ValueError, match="unknown model 'resnet50'"):
        list_entries(models=["resnet50"])


def test_embedded_segmenter_finds_the_sky(tmp_path):
    """With the weights in the package: no checkpoint is needed."""
    with weights_in(SHIPPED):
        service = Service(Catalogue(), folder=str(tmp_path))
        assert service.catalogue.names() == [f"{name}.tiny_imagenet" for name in catalogues.FAMILIES]
        assert service.catalogue.names("segmentation") == ["paca_nano+paca.camvid"]
        segmentation = service.segment(str(photo_paths()["camera"]), "paca_nano+paca")
    assert segmentation.areas()[0]["name"] == "sky"
    above, below = segmentation.labels[:150] == 0, segmentation.labels[-150:] == 0  # of 512 rows
    assert above.mean() > 0.7
    assert below.mean() < 0.01


def test_models_are_loaded_on_use_and_unloaded_by_age(monkeypatch):
    monkeypatch.setattr(catalogues, "MAX_LOADED", 1)
    catalogue = Catalogue(models=["svit_nano", "vt_nano"])
    assert not catalogue.loaded
    first = catalogue.classifier("svit_nano")
    assert catalogue.classifier("svit_nano") is first
    catalogue.classifier("vt_nano")
    assert list(catalogue.loaded) == ["vt_nano"]


def test_results_are_cached_by_image_content(service, images, tmp_path, monkeypatch):
    monkeypatch.setattr(services, "MAX_CACHED", 3)
    inspection = service.inspect(str(images[0]), "svit_nano")
    copy = tmp_path / "copy.png"
    copy.write_bytes(images[0].read_bytes())
    assert service.inspect(str(copy), "svit_nano") is inspection
    assert service.inspect(str(images[0]), "vt_nano") is not inspection
    for path in images[1:6]:
        service.inspect(str(path), "svit_nano")
    assert len(service.cache) == 3


def test_threads_get_their_own_results(service, images):
    """Hooks on a model would record concurrent forward passes of other threads."""
    alone = [summarize(service.inspect(str(path), "svit_nano")) for path in images[:6]]
    service.cache.clear()
    with ThreadPoolExecutor(6) as pool:
        threaded = list(pool.map(lambda path: summarize(service.inspect(str(path), "svit_nano")), images[:6] * 2))
    for expected, result in zip(alone * 2, threaded, strict=True):
        assert result["predictions"] == expected["predictions"]
        assert result["stages"] == expected["stages"]
    assert len({json.dumps(result["stages"]) for result in alone}) == 6


def test_segmentation_is_that_of_the_model(service, segmenter, tmp_path):
    path = make_image(tmp_path / "street.png", 5, (64, 96))
    segmentation = service.segment(str(path), "streets")
    model, card = open_task_model(segmenter)
    expected = segment_image(model, card, Image.open(path).convert("RGB"))
    np.testing.assert_array_equal(segmentation.labels, expected.labels)
    assert segmentation.labels.shape == (64, 96)
    assert sum(row["share"] for row in segmentation.areas()) == pytest.approx(1, abs=1e-4)
    np.testing.assert_array_equal(np.array(segmentation.palette_image()), segmentation.labels)
    assert not np.array_equal(segmentation.draw(0.2), segmentation.draw(0.9))
    html = fragments.areas_list([row | {"name": "<b>tree"} for row in segmentation.areas()])
    assert "<b>tree" not in html


def test_segmentation_size_is_bounded(service, tmp_path):
    Image.new("RGB", (2000, 1000), "green").save(tmp_path / "wide.png")
    assert service.segment(str(tmp_path / "wide.png"), "streets").labels.shape == (320, 640)


def test_downloads_have_plain_names_and_expire(service, images, monkeypatch):
    monkeypatch.setattr(services, "MAX_DOWNLOADS", 2)
    inspection = service.inspect(str(images[0]), "svit_nano")
    for _ in range(4):
        png, text = service.write_inspection(inspection, 1, 0)
    assert png.endswith("image-0-svit_nano.png")
    assert Image.open(png).width > 1000
    summary = json.loads(Path(text).read_text())
    assert summary["token"]["token"] == 0
    assert summary["predictions"] == summarize(inspection)["predictions"]
    assert len([path for path in service.folder.iterdir() if path.name.startswith("tmp")]) == 2
    png, text = service.write_segmentation(service.segment(str(images[0]), "streets"), 0.5)
    assert Image.open(png).size == (80, 64)
    assert json.loads(Path(text).read_text())["areas"]


def test_bad_upload_loads_no_model(segmenter, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    service = Service(Catalogue(models=["svit_nano"]), Limits(), str(tmp_path / "files"))
    with pytest.raises(BadUpload):
        service.inspect(str(tmp_path / "notes.txt"), "svit_nano")
    assert not service.catalogue.loaded
    service.close()
    assert not (tmp_path / "files").exists()


def test_video_model_is_rejected(tmp_path):
    import saccade
    from saccade.models.card import Card, Preprocess, save_model

    torch.manual_seed(0)
    model = saccade.create_model("video_sparseformer_nano", num_classes=2)
    card = Card("video_sparseformer_nano", 2, {}, ["a", "b"], Preprocess(64, frames=8))
    save_model(model, tmp_path / "video.safetensors", card)
    with pytest.raises(ValueError, match="got a video classification model"):
        Catalogue([str(tmp_path / "video.safetensors")])
