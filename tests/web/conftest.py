"""Small images, a small service, and its running page."""

import numpy as np
import pytest
from PIL import Image

from saccade.models.card import Card, Preprocess, save_model
from saccade.tasks.segmentation import create_segmenter
from saccade.web.catalogue import Catalogue
from saccade.web.service import Service


@pytest.fixture(scope="session")
def segmenter(tmp_path_factory):
    """The run folder of a segmenter with three classes."""
    import torch

    torch.manual_seed(0)
    small = {"dim": 16, "branch_dim": 16}
    model = create_segmenter("vt_nano", "fpn", 3, head_kwargs=small)
    card = Card("vt_nano", 3, {}, ["sky", "road", "<b>tree"], Preprocess(64), "segmentation", "fpn", small)
    folder = tmp_path_factory.mktemp("runs") / "streets"
    save_model(model, folder / "best.safetensors", card)
    return folder


@pytest.fixture(scope="session")
def service(segmenter, tmp_path_factory):
    catalogue = Catalogue([str(segmenter)], ["svit_nano", "vt_nano"])
    return Service(catalogue, folder=str(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="session")
def server(service):
    """The running page."""
    pytest.importorskip("gradio")
    from saccade.web.server import start

    page = start(service)
    yield page
    page.close()


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Paths of 24 different images."""
    folder = tmp_path_factory.mktemp("images")
    return [make_image(folder / f"image-{number}.png", number) for number in range(24)]


def make_image(path, seed, size=(64, 80)):
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 10, 3), dtype=np.uint8))
    small.resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path
