"""Requests to the API in a process of their own: `python -m tests.web.leak_requests FOLDER` prints what they left.

What other tests have imported, cached and started would count in a process that ran them before.
"""

import gc
import io
import json
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from fastapi.testclient import TestClient
from PIL import Image

import saccade
from saccade.models.card import Card, Preprocess, save_model
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


def make_service(folder: Path) -> Service:
    """With a model that takes a millisecond."""
    torch.manual_seed(0)
    small = {"dims": [8, 8], "depths": [1, 1], "heads": [1, 1], "super_token": [2, 1], "layer_scale": [None, None]}
    save_model(saccade.create_model("svit_nano", num_classes=3, **small), folder / "tiny.safetensors",
               Card("svit_nano", 3, small, ["a", "b", "c"], Preprocess(32)))  # fmt: skip
    return Service(Catalogue([str(folder / "tiny.safetensors")]), folder=str(folder / "served"))


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


def main(folder: Path) -> None:
    service = make_service(folder)
    with TestClient(make_api(service)) as client:
        objects, size, statuses = growth(client, REQUESTS)
    files = [path.name for path in service.folder.iterdir()]
    print(json.dumps({"objects": objects, "bytes": size, "statuses": statuses, "results": len(service.cache),
                      "files": files}))  # fmt: skip
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
