"""Measure exported classifiers: accuracy in float32, float16 and int8, file size, and images per second of one core.

`python benchmarks/exported.py --data val.parquet --images 1000 --out benchmarks/results/exported.json`

`--data` is a Parquet file with the columns `image` (encoded bytes) and `label`, such as the validation split of Tiny
ImageNet. Speeds are per second of CPU time with one thread, so that other load on the machine changes them little.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

import saccade
from saccade._files import write_json
from saccade.benchmark import describe_machine
from saccade.data import photo_paths
from saccade.inference import OnnxModel, export_model
from saccade.tasks.load import card_of
from saccade.tasks.predict import PredictOptions, make_predictor

MODELS = ["sparseformer_nano", "svit_nano", "paca_nano", "vt_nano"]  # embedded weights of Tiny ImageNet
DTYPES = {"float32": None, "float16": torch.float16, "int8": torch.int8}
SECONDS = 2.0  # CPU time of one measurement of speed


def read_images(path: str, count: int) -> tuple[list[Image.Image], np.ndarray]:
    """`count` images, evenly spaced over the file, and their labels."""
    table = parquet.read_table(path, columns=["image", "label"])
    rows = np.linspace(0, table.num_rows - 1, count).astype(int)
    entries = table.take(rows).to_pylist()
    images = [Image.open(io.BytesIO(entry["image"]["bytes"])).convert("RGB") for entry in entries]
    return images, np.array([entry["label"] for entry in entries])


def per_core(step: Callable[[], Any], images: int) -> float:
    """Images per second of CPU time."""
    step()
    start, steps = time.process_time(), 0
    while time.process_time() - start < SECONDS:
        step()
        steps += 1
    return steps * images / (time.process_time() - start)


def measure_model(name: str, images: list[Image.Image], labels: np.ndarray, folder: Path) -> list[dict[str, Any]]:
    """One row per dtype of the file."""
    model, rows, reference = saccade.load(f"{name}.tiny_imagenet"), [], None
    for dtype, value in DTYPES.items():
        export = export_model(model, folder / f"{name}_{dtype}.onnx", dtype=value, card=card_of(model))
        runner = OnnxModel(export.path, threads=1)
        inputs = np.concatenate([runner.preprocess(image) for image in images])
        predicted = np.concatenate([runner(inputs[i : i + 50])[0] for i in range(0, len(inputs), 50)]).argmax(1)
        reference = predicted if reference is None else reference
        rows.append(
            {
                "model": name,
                "dtype": dtype,
                "top1": 100 * float((predicted == labels).mean()),
                "agreement": 100 * float((predicted == reference).mean()),
                "bytes": export.bytes,
                "images_per_core_second": per_core(lambda run=runner, batch=inputs[:16]: run(batch), 16),
                "px": inputs.shape[2],
            }
        )
        print(rows[-1], flush=True)
    return rows


def measure_pytorch(name: str, size: int = 64, batch: int = 64) -> dict[str, Any]:
    """The PyTorch model in a loop over random pixels, and its preprocessing of the bundled photographs."""
    model = saccade.load(f"{name}.tiny_imagenet")
    pixels = torch.rand(batch, 3, size, size)
    with torch.inference_mode():
        speed = per_core(lambda: model(pixels), batch)
    return {"model": name, "px": size, "batch": batch, "images_per_core_second": speed}


def measure_decoding(size: int = 224) -> dict[str, Any]:
    """Read JPEG files of 500 x 375 px (the bundled photographs, resized) as `saccade predict` does."""
    predictor = make_predictor("svit_nano", PredictOptions(size=size))
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for stem, path in photo_paths().items():
            files.append(Path(folder) / f"{stem}.jpg")
            Image.open(path).convert("RGB").resize((500, 375)).save(files[-1], quality=90)
        speed = per_core(lambda: [predictor.read(file) for file in files], len(files))
    return {"jpeg": [500, 375], "px": size, "images_per_core_second": speed}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="PARQUET")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--out", metavar="JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = read_images(args.data, args.images)
    document = {"machine": describe_machine("cpu"), "images": len(images)}
    document["decoding"] = measure_decoding()
    document["pytorch"] = [measure_pytorch(name) for name in args.models]
    print(document, flush=True)
    document["onnx"] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            document["onnx"] += measure_model(name, images, labels, Path(folder))
            if args.out:
                write_json(args.out, document)
