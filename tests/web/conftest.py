"""Small pictures, a small service, and the page it stands behind."""

import numpy as np
import pytest
from PIL import Image

from saccade.models.card import Card, Preprocess, save_model
from saccade.tasks.segmentation import create_segmenter
from saccade.web.catalogue import Catalogue
from saccade.web.service import Service


@pytest.fixture(scope="session")
def segmenter(tmp_path_factory):
    """A run's folder with a segmenter of three classes."""
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
def running(service):
    """The page, listening."""
    pytest.importorskip("gradio")
    from saccade.web.server import start

    page = start(service)
    yield page
    page.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Files of 24 different pictures: number -> path."""
    folder = tmp_path_factory.mktemp("pictures")
    return [make_picture(folder / f"picture-{number}.png", number) for number in range(24)]


def make_picture(path, seed, size=(64, 80)):
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 10, 3), dtype=np.uint8))
    small.resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path
