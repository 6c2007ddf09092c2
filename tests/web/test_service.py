"""Models on offer, segments, memory: all that stands behind the page, without the page."""

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
from saccade.web import service as services
from saccade.web import words
from saccade.web.catalogue import Catalogue, find_offers
from saccade.web.look import facts
from saccade.web.segment import segment
from saccade.web.service import Service
from saccade.web.uploads import BadUpload, Limits
from tests.web.conftest import make_picture
from tests.weights.folder import SHIPPED, load_tool, make_run, weights_in


def test_what_is_offered_without_weights(tmp_path):
    with weights_in(tmp_path):
        offers = find_offers()
    assert [(offer.name, offer.trained) for offer in offers] == [(name, False) for name in catalogues.FAMILIES]


def test_what_is_offered_with_weights(tmp_path, segmenter):
    with weights_in(tmp_path / "weights"):
        load_tool().embed(make_run(tmp_path / "run"), "tiny_imagenet")
        with weights_in(tmp_path / "weights"):
            own = make_run(tmp_path / "mine")
            offers = Catalogue([str(own), str(segmenter), str(own / "best.safetensors")])
            assert offers.names() == ["mine", "best", "svit_nano.tiny_imagenet", *catalogues.FAMILIES[1:]]
            assert offers.names("segmentation") == ["streets"]
            shipped = offers.classifier("svit_nano.tiny_imagenet")
            assert (shipped.trained, shipped.labels[0], shipped.size) == (True, "tabby", 64)
            assert offers.classifier("svit_nano") is shipped  # the tag may be left out
            assert not offers.classifier("paca_nano").trained
            with pytest.raises(ValueError, match="there is no model 'nonsense' here"):
                offers.classifier("nonsense")
            with pytest.raises(ValueError, match="there is no model '/etc/passwd' here"):
                offers.segmenter("/etc/passwd")
            assert find_offers(models=["svit_nano"])[0].trained
    with pytest.raises(ValueError, match="unknown model 'resnet50'"):
        find_offers(models=["resnet50"])


def test_the_segmenter_that_is_shipped_is_on_offer(tmp_path):
    """Of the package's own folder: segmentation needs no checkpoint of one's own, and finds the sky over a man."""
    with weights_in(SHIPPED):
        page = Service(Catalogue(), folder=str(tmp_path))
        assert page.catalogue.names() == [f"{name}.tiny_imagenet" for name in catalogues.FAMILIES]
        assert page.catalogue.names("segmentation") == ["paca_nano+paca.camvid"]
        found = page.segment(str(photo_paths()["camera"]), "paca_nano+paca")
    assert found.areas()[0]["name"] == "sky"
    above, below = found.labels[:150] == 0, found.labels[-150:] == 0  # of 512 rows
    assert above.mean() > 0.7
    assert below.mean() < 0.01


def test_models_are_loaded_when_asked_for_and_only_some_kept(monkeypatch):
    monkeypatch.setattr(catalogues, "KEPT", 1)
    offers = Catalogue(models=["svit_nano", "vt_nano"])
    assert not offers.kept
    first = offers.classifier("svit_nano")
    assert offers.classifier("svit_nano") is first
    offers.classifier("vt_nano")
    assert list(offers.kept) == ["vt_nano"]


def test_looks_are_remembered_by_content_and_bounded(service, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(services, "KEPT", 3)
    look = service.look(str(pictures[0]), "svit_nano")
    copy = tmp_path / "copy.png"
    copy.write_bytes(pictures[0].read_bytes())
    assert service.look(str(copy), "svit_nano") is look
    assert service.look(str(pictures[0]), "vt_nano") is not look
    for path in pictures[1:6]:
        service.look(str(path), "svit_nano")
    assert len(service.memory) == 3


def test_many_threads_get_their_own_answers(service, pictures):
    """Models are listened to with hooks: two at once in one model would hear each other."""
    alone = [facts(service.look(str(path), "svit_nano")) for path in pictures[:6]]
    service.memory.clear()
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda path: facts(service.look(str(path), "svit_nano")), pictures[:6] * 2))
    for one, other in zip(alone * 2, together, strict=True):
        assert one["answers"] == other["answers"]
        assert one["stages"] == other["stages"]
    assert len({json.dumps(one["stages"]) for one in alone}) == 6


def test_a_segmentation_is_the_models(service, segmenter, tmp_path):
    path = make_picture(tmp_path / "street.png", 5, (64, 96))
    found = service.segment(str(path), "streets")
    model, card = open_task_model(segmenter)
    again = segment(model, card, Image.open(path).convert("RGB"))
    np.testing.assert_array_equal(found.labels, again.labels)
    assert found.labels.shape == (64, 96)
    assert sum(row["share"] for row in found.areas()) == pytest.approx(1, abs=1e-4)
    np.testing.assert_array_equal(np.array(found.label_image()), found.labels)
    assert not np.array_equal(found.draw(0.2), found.draw(0.9))
    html = words.areas([row | {"name": "<b>tree"} for row in found.areas()])
    assert "<b>tree" not in html


def test_a_large_photograph_is_segmented_in_bounded_size(service, tmp_path):
    Image.new("RGB", (2000, 1000), "green").save(tmp_path / "wide.png")
    assert service.segment(str(tmp_path / "wide.png"), "streets").labels.shape == (320, 640)


def test_downloads_are_files_with_plain_names_and_few(service, pictures, monkeypatch):
    monkeypatch.setattr(services, "FILES", 2)
    look = service.look(str(pictures[0]), "svit_nano")
    for _ in range(4):
        png, text = service.downloads(look, 1, 0)
    assert png.endswith("picture-0-svit_nano.png")
    assert Image.open(png).width > 1000
    told = json.loads(Path(text).read_text())
    assert told["token"]["token"] == 0
    assert told["answers"] == facts(look)["answers"]
    assert len([path for path in service.folder.iterdir() if path.name.startswith("tmp")]) == 2
    png, text = service.segment_downloads(service.segment(str(pictures[0]), "streets"), 0.5)
    assert Image.open(png).size == (80, 64)
    assert json.loads(Path(text).read_text())["areas"]


def test_a_bad_upload_reaches_no_model(segmenter, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    service = Service(Catalogue(models=["svit_nano"]), Limits(), str(tmp_path / "files"))
    with pytest.raises(BadUpload):
        service.look(str(tmp_path / "notes.txt"), "svit_nano")
    assert not service.catalogue.kept
    service.close()
    assert not (tmp_path / "files").exists()


def test_a_video_model_is_refused(tmp_path):
    import saccade
    from saccade.models.card import Card, Preprocess, save_model

    torch.manual_seed(0)
    model = saccade.create_model("video_sparseformer_nano", num_classes=2)
    card = Card("video_sparseformer_nano", 2, {}, ["a", "b"], Preprocess(64, frames=8))
    save_model(model, tmp_path / "video.safetensors", card)
    with pytest.raises(ValueError, match="a model of videos"):
        Catalogue([str(tmp_path / "video.safetensors")])
