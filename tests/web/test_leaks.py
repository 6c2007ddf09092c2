"""1000 requests leave nothing in memory."""

import gc
import io
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="the API needs the web extra: pip install 'saccade[web]'")
from fastapi.testclient import TestClient

import saccade
from saccade.web import service as services
from saccade.web.api import make_api
from saccade.web.catalogue import Catalogue
from saccade.web.service import Service

REQUESTS = 1000
WARM = 100  # more than the cache of results holds


def encoded(number: int) -> bytes:
    pixels = np.full((8, 8, 3), (number % 256, number // 256, 7), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def send(client: TestClient, number: int) -> int:
    """One of: a new image, a damaged one, a model that does not exist, an invalid name, an explanation."""
    content, parameters, path = encoded(number), {"model": "tiny", "name": f"{number}.png"}, "/predict"
    if number % 10 == 1:
        content = content[: 20 + number % 30]
    elif number % 10 == 2:
        parameters["model"] = f"model-{number}"
    elif number % 10 == 3:
        parameters["name"] = f"../{number}.png"
    elif number % 10 == 4:
        path = "/tokens"
    return client.post(path, params=parameters, content=content).status_code


@pytest.fixture
def service(tmp_path):
    """With a model that takes a millisecond."""
    import torch

    from saccade.models.card import Card, Preprocess, save_model

    torch.manual_seed(0)
    small = {"dims": [8, 8], "depths": [1, 1], "heads": [1, 1], "super_token": [2, 1], "layer_scale": [None, None]}
    save_model(saccade.create_model("svit_nano", num_classes=3, **small), tmp_path / "tiny.safetensors",
               Card("svit_nano", 3, small, ["a", "b", "c"], Preprocess(32)))  # fmt: skip
    service = Service(Catalogue([str(tmp_path / "tiny.safetensors")]), folder=str(tmp_path / "served"))
    yield service
    service.close()


def growth(client: TestClient, requests: int) -> tuple[Counter, int, Counter]:
    """Objects by type and bytes that the requests left, after `WARM` others; and their statuses."""
    tracemalloc.start()  # before the results that later ones replace in the cache
    for number in range(WARM):
        send(client, number)
    gc.collect()
    before, statuses = Counter(type(each).__name__ for each in gc.get_objects()), Counter()
    begin, _ = tracemalloc.get_traced_memory()
    for number in range(WARM, WARM + requests):
        statuses[send(client, number)] += 1
    gc.collect()
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Counter(type(each).__name__ for each in gc.get_objects()) - before, end - begin, statuses


@pytest.mark.slow
def test_thousand_requests_leave_nothing_in_memory(service, tmp_path):
    with TestClient(make_api(service)) as client:
        objects, size, statuses = growth(client, REQUESTS)
    assert statuses == {200: 700, 400: 200, 422: 100}
    assert len(service.cache) == services.MAX_CACHED
    assert sum(objects.values()) < REQUESTS / 4, objects
    assert size < 100 * REQUESTS
    assert [path.name for path in service.folder.iterdir()] == ["photos"]
