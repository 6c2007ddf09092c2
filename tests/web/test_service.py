"""Model catalogue, segmentation, cache and downloads, without Gradio."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.inspection import summarize
from saccade.models.card import Card, Preprocess, save_model
from saccade.web import catalogue as catalogues
from saccade.web import service as services
from saccade.web.catalogue import Catalogue, list_entries
from saccade.web.service import Service, above
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
            embedded = catalogue.subject("svit_nano.tiny_imagenet")
            assert (embedded.trained, embedded.labels[0], embedded.size) == (True, "tabby", 64)
            assert catalogue.subject("svit_nano") is embedded  # the tag is optional
            assert not catalogue.subject("paca_nano").trained
            with pytest.raises(ValueError, match="unknown model 'nonsense'"):
                catalogue.subject("nonsense")
            with pytest.raises(ValueError, match="unknown model '/etc/passwd'"):
                catalogue.model("/etc/passwd")
            assert list_entries(models=["svit_nano"])[0].trained
    with pytest.raises(ValueError, match="unknown model 'resnet50'"):
        list_entries(models=["resnet50"])


def test_embedded_segmenter_finds_the_sky(tmp_path):
    """With the weights in the package: no checkpoint is needed."""
    with weights_in(SHIPPED):
        service = Service(Catalogue(), folder=str(tmp_path))
        assert service.catalogue.names() == [f"{name}.tiny_imagenet" for name in catalogues.FAMILIES]
        assert service.catalogue.names("segmentation") == ["paca_nano+paca.camvid"]
        segmentation = service.predict(str(photo_paths()["camera"]), "paca_nano+paca")
    assert segmentation.areas()[0]["name"] == "sky"
    above, below = segmentation.labels[:150] == 0, segmentation.labels[-150:] == 0  # of 512 rows
    assert above.mean() > 0.7
    assert below.mean() < 0.01


def test_models_are_loaded_on_use_and_unloaded_by_age(monkeypatch):
    monkeypatch.setattr(catalogues, "MAX_LOADED", 1)
    catalogue = Catalogue(models=["svit_nano", "vt_nano"])
    assert not catalogue.loaded
    first = catalogue.subject("svit_nano")
    assert catalogue.subject("svit_nano") is first
    catalogue.subject("vt_nano")
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


def test_cached_result_needs_neither_decoding_nor_the_model(service, images, monkeypatch):
    inspection = service.inspect(str(images[0]), "svit_nano")
    monkeypatch.setattr(services, "read_upload", lambda *_: pytest.fail("the upload was decoded again"))
    with service.model_lock:  # another request runs the model
        assert service.inspect(str(images[0]), "svit_nano") is inspection


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


def test_prediction_is_that_of_saccade_predict(service, segmenter, detector, tmp_path):
    path = make_image(tmp_path / "street.png", 5, (64, 96))
    segmentation = service.predict(str(path), "streets")
    np.testing.assert_array_equal(segmentation.labels, saccade.predict(str(segmenter), path)[0].labels)
    assert (segmentation.name, segmentation.labels.shape) == ("street.png", (64, 96))
    path.unlink()
    assert segmentation.draw(0.2) != segmentation.draw(0.9)  # the upload is not read again
    path = make_image(path, 5, (64, 96))
    objects = service.predict(str(path), "shapes")
    expected = saccade.predict(str(detector), path, threshold=0.05)[0]
    np.testing.assert_allclose(objects.boxes, expected.boxes, atol=1e-3)
    limit = float(objects.scores.median())
    assert above(objects, limit).scores.min() >= limit
    assert 0 < len(above(objects, limit)) < len(objects)
    classes = service.predict(str(path), "svit_nano").classes
    assert classes == saccade.predict(service.catalogue.model("svit_nano"), path)[0].classes


def test_video_is_classified(service, video_model, video):
    prediction = service.predict(str(video), "motions")
    assert prediction.classes == saccade.predict(str(video_model), video)[0].classes
    assert {entry.name for entry in prediction.classes} == {"left", "right"}
    assert prediction.image.size == (64, 48)


def test_video_model_rejects_an_image_and_random_bytes(service, images, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(BadUpload, match=r"^clip\.mp4 is not a video that can be decoded\. Supported: 3gp, avi"):
        service.predict(str(tmp_path / "clip.mp4"), "motions")
    with pytest.raises(BadUpload, match=r"clip\.mp4 is not an image"):
        service.predict(str(tmp_path / "clip.mp4"), "svit_nano")


def test_entries_say_what_models_know(service):
    entries = service.catalogue.entries
    assert entries["motions"] == (
        "motions",
        entries["motions"].source,
        "video",
        True,
        "2 classes of motions, 91 % top-1",
    )
    assert entries["streets"].knows == "3 classes"
    with weights_in(SHIPPED):
        descriptions = {entry.name: entry.knows for entry in list_entries()}
    assert descriptions["svit_nano.tiny_imagenet"] == "200 classes of Tiny-ImageNet-200, 47 % top-1"
    assert descriptions["paca_nano+paca.camvid"] == "11 classes of CamVid, 60 % mIoU"


def test_segmentation_size_is_bounded(service, tmp_path):
    Image.new("RGB", (2000, 1000), "green").save(tmp_path / "wide.png")
    assert service.predict(str(tmp_path / "wide.png"), "streets").labels.shape == (320, 640)


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
    prediction = service.predict(str(images[0]), "streets")
    png, text = service.write_prediction(prediction, prediction.draw(), "streets")
    assert Image.open(png).size == (80, 64)
    assert json.loads(Path(text).read_text())["classes"]


def test_bad_upload_loads_no_model(segmenter, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    service = Service(Catalogue(models=["svit_nano"]), Limits(), str(tmp_path / "files"))
    with pytest.raises(BadUpload):
        service.inspect(str(tmp_path / "notes.txt"), "svit_nano")
    assert not service.catalogue.loaded
    service.close()
    assert not (tmp_path / "files").exists()


def test_registered_video_model_is_offered_for_videos(video):
    catalogue = Catalogue(models=["video_sparseformer_nano"])
    assert (catalogue.names(), catalogue.names("video")) == ([], ["video_sparseformer_nano"])
    service = Service(catalogue)
    assert len(service.predict(str(video), "video_sparseformer_nano").classes) == 5
    with pytest.raises(ValueError, match="unknown model 'video_sparseformer_nano'"):
        service.inspect(str(video), "video_sparseformer_nano")
    service.close()


def test_labels_of_a_multi_label_model_are_marked_one_by_one(tmp_path):
    pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
    from saccade.web.page import show_predictions

    torch.manual_seed(0)
    model = saccade.create_model("vt_nano", num_classes=3)
    with torch.no_grad():
        model.head.fc.weight.zero_()
        model.head.fc.bias.copy_(torch.tensor([3.0, 2.0, -4.0]))
    card = Card("vt_nano", 3, {}, ["dog", "grass", "car"], Preprocess(64), multi_label=True)
    save_model(model, tmp_path / "run" / "best.safetensors", card)
    service = Service(Catalogue([str(tmp_path / "run")]), folder=str(tmp_path / "served"))
    inspection = service.inspect(make_image(tmp_path / "a.png", 0), "run")
    html = str(show_predictions(service, inspection, "run"))
    rows = html.split("<li")[1:]
    assert [(name in row, "present" in row) for name, row in zip(("dog", "grass", "car"), rows, strict=True)] == [
        (True, True),
        (True, True),
        (True, False),
    ]
    assert "95.3%" in rows[0]  # the sigmoid of 3
    assert "Each label has its own probability" in html
