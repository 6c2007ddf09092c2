"""Throughput of batch prediction against a loop over the bare model, interleaved in one run."""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from saccade.benchmark.machine import timed
from saccade.inference.batch import predict_batch
from saccade.models.registry import create_model
from saccade.tasks.predict import inference_autocast

MIN_BATCHES = 8


class BatchThroughput(NamedTuple):
    """Images per second, medians over the rounds."""

    model: str
    size: int
    batch: int
    images: int  # per round: JPEG files of `size` pixels
    loop: float  # the model alone, on one batch of pixels in memory
    predict: float  # `predict_batch`: list, decode, preprocess, predict, write Parquet
    rounds: list[tuple[float, float]]  # loop, predict

    @property
    def ratio(self) -> float:
        """Median of the ratios of the rounds: other load on the machine affects both halves of a round alike."""
        return statistics.median(predict / loop for loop, predict in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"mode": "batch", "ratio": self.ratio}


def measure_batch(
    name: str,
    size: int,
    batch: int,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    rounds: int = 7,
    seconds: float = 0.2,
    progress: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> BatchThroughput:
    """Measure a classifier; a round takes at least `seconds` for the loop and MIN_BATCHES batches."""
    torch.manual_seed(0)
    progress(f"building {name} at {size} px")
    model = create_model(name, **options).to(device).eval()
    pixels = torch.randn(batch, 3, size, size, device=device)
    _loop(model, pixels, 2, dtype)
    batches = max(MIN_BATCHES, round(seconds / _loop(model, pixels, 2, dtype) * 2))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        write_images(images, size, batch * batches)
        for number in range(rounds):
            progress(f"timing {name}, round {number + 1} of {rounds}")
            loop = batch * batches / _loop(model, pixels, batches, dtype)
            summary = predict_batch(
                model, images, Path(folder) / str(number), task="classify", batch_size=batch, size=size, dtype=dtype
            )
            if summary.errors:
                raise RuntimeError(f"expected no errors, got {summary.errors} in {summary.rows} rows.")
            results.append((loop, summary.predicted / summary.seconds))
    loops, predictions = zip(*results, strict=True)
    return BatchThroughput(
        name, size, batch, batch * batches, statistics.median(loops), statistics.median(predictions), results
    )


def _loop(model: nn.Module, pixels: torch.Tensor, batches: int, dtype: torch.dtype | None) -> float:
    """Seconds of a loop over the model."""
    with torch.inference_mode(), inference_autocast(pixels.device, dtype):
        return batches * timed(lambda: model(pixels), str(pixels.device), batches)


def write_images(folder: Path, size: int, count: int) -> None:
    """JPEG files of smooth noise, which compresses like a photograph."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (size // 8 + 1, size // 8 + 1, 3), np.uint8))
        coarse.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{number:06d}.jpg", quality=90)
