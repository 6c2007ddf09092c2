"""Small images, a small service, and its running page."""

import numpy as np
import pytest
from PIL import Image

from saccade.data.decode.video import write_video
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
def detector(tmp_path_factory):
    """The run folder of a detector with two classes."""
    import torch

    from saccade import create_detector

    torch.manual_seed(0)
    options = {"num_tokens": 16, "detect_tokens": 9, "min_size": 48, "max_size": 96}
    model = create_detector("sparseformer_nano", "sparse", 2, **options)
    card = Card("sparseformer_nano", 2, {}, ["disc", "star"], Preprocess(64), "detection", "sparse", options)
    folder = tmp_path_factory.mktemp("runs") / "shapes"
    save_model(model, folder / "best.safetensors", card)
    return folder


@pytest.fixture(scope="session")
def video_model(tmp_path_factory):
    """The run folder of a video classifier with two classes and a measured accuracy."""
    import torch

    from saccade import create_model

    torch.manual_seed(0)
    model = create_model("video_sparseformer_nano", num_classes=2)
    card = Card("video_sparseformer_nano", 2, {}, ["left", "right"], Preprocess(64, frames=8))
    folder = tmp_path_factory.mktemp("runs") / "motions"
    save_model(model, folder / "best.safetensors", card)
    (folder / "result.json").write_text('{"data": "motions", "best": {"top1": 91.2}}')
    return folder


@pytest.fixture(scope="session")
def service(segmenter, detector, video_model, tmp_path_factory):
    catalogue = Catalogue([str(segmenter), str(detector), str(video_model)], ["svit_nano", "vt_nano"])
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


@pytest.fixture(scope="session")
def video(tmp_path_factory):
    """The path of a video of 12 frames."""
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    write_video(path, np.stack([np.full((48, 64, 3), 20 * number, np.uint8) for number in range(12)]))
    return path


def make_image(path, seed, size=(64, 80)):
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 10, 3), dtype=np.uint8))
    small.resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path
