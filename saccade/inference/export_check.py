"""Compare an exported file with its PyTorch model on the bundled photographs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.data.decode.image import read_image
from saccade.data.synthetic.photos import photo_paths
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.image import eval_transform
from saccade.inference.export import DetectorGraph, shorter_side
from saccade.inference.onnx_predict import OnnxModel, to_array
from saccade.models.card import Card
from saccade.tasks.sparse_detector import SparseDetector

TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "int8": 2e-1}  # of the largest output of the PyTorch model
IN_GRAPH_TOLERANCE = 5e-3  # with preprocessing in the graph: resized pixels may differ by one of 256 levels
BATCHES = (1, 3, 4)  # the example has 2 images


class Comparison(NamedTuple):
    """The largest difference of two outputs for one input shape."""

    inputs: str  # "images": same pixels for both; "photographs": each from the file through its own preprocessing
    batch: int
    height: int
    width: int
    difference: float
    largest: float  # absolute output of the PyTorch model

    @property
    def relative(self) -> float:
        return self.difference / max(self.largest, 1e-6)


def check_export(
    path: str | Path,
    model: nn.Module,
    card: Card,
    metadata: dict[str, Any],
    batches: Sequence[int] = BATCHES,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> list[Comparison]:
    """Compare a file with the model it was exported from, at several sizes and batch sizes where these are dynamic."""
    is_onnx = Path(path).suffix != ".pt2"
    runner: Any = OnnxModel(path) if is_onnx else torch.export.load(path).module()
    model = model.cpu().eval()
    reference = DetectorGraph(model).eval() if isinstance(model, SparseDetector) else model
    photos = [read_image(photo) for photo in photo_paths().values()]
    shape: list[int | str] = metadata["input"]
    batches = batches if shape[0] == "batch" else [int(shape[0])]
    if shape[-1] != "width":
        sizes = [(int(shape[-2]), int(shape[-1]))]
    sizes = sizes or check_sizes(card.preprocess.size)
    rows = []
    with torch.no_grad():
        for height, width in sizes:
            for batch in batches:
                pixels = np.stack([resized(photo, height, width) for photo in repeat(photos, batch)])
                rows.append(compare("images", runner, reference, *both_inputs(pixels, card, metadata)))
        if is_onnx and not card.preprocess.frames and shape[-1] == "width" and shape[0] == "batch":
            for photo in photos:
                ours, theirs = runner.preprocess(photo), torch_inputs(photo, model, card)
                rows.append(compare("photographs", runner, reference, ours, theirs))
    return rows


def check_sizes(side: int) -> list[tuple[int, int]]:
    """Three shapes around a model's own size: square, portrait, landscape with sides that no stride divides."""
    return [(side, side), (side, max(40, side * 3 // 4)), (side + 3, side + side // 4 + 1)]


def repeat(photos: Sequence[Image.Image], count: int) -> Iterator[Image.Image]:
    return (photos[i % len(photos)] for i in range(count))


def resized(photo: Image.Image, height: int, width: int) -> np.ndarray:
    """uint8 (3, height, width)."""
    return to_array(photo.resize((width, height), Image.Resampling.BICUBIC))


def both_inputs(pixels: np.ndarray, card: Card, metadata: dict[str, Any]) -> tuple[np.ndarray, Tensor]:
    """uint8 images (B, 3, H, W) -> the file's input, and that of the PyTorch model."""
    frames = card.preprocess.frames
    if frames:  # a clip is a photograph that moves by a pixel per frame
        pixels = np.stack([np.roll(pixels, shift, axis=3) for shift in range(frames)], axis=2)
    mean, std = (tuple(metadata["preprocess"][key]) for key in ("mean", "std"))
    if not metadata["preprocess"]["in_graph"]:
        images = normalize(torch.from_numpy(pixels).float() / 255, mean, std)
        return images.numpy(), images
    return pixels, normalize(torch.from_numpy(prepared(pixels, card)).float() / 255, mean, std)


def prepared(pixels: np.ndarray, card: Card) -> np.ndarray:
    """Resize and crop uint8 images (B, 3, H, W) or clips with Pillow, where the card says so."""
    if card.task != "classification":
        return pixels
    if pixels.ndim == 5:
        frames = [prepared(pixels[:, :, t], card) for t in range(pixels.shape[2])]
        return np.stack(frames, axis=2)
    preprocess = card.preprocess
    side = shorter_side(preprocess)
    transform = eval_transform(preprocess.size, preprocess.size / side, preprocess.interpolation)
    return np.stack([transform(Image.fromarray(image.transpose(1, 2, 0))).numpy() for image in pixels])


def torch_inputs(photo: Image.Image, model: nn.Module, card: Card) -> Tensor:
    """A photograph through the preprocessing of the PyTorch path."""
    preprocess = card.preprocess
    if card.task == "classification":
        pixels = (
            eval_transform(preprocess.size, preprocess.crop_pct, preprocess.interpolation)(photo)[None].float() / 255
        )
        return normalize(pixels, preprocess.mean, preprocess.std)
    pixels = torch.from_numpy(to_array(photo)).float() / 255
    if isinstance(model, SparseDetector):
        batch, _ = model.transform([pixels])
        height, width = batch.image_sizes[0]
        return batch.tensors[:, :, :height, :width]
    pixels, shorter = pixels[None], card.shorter
    if shorter and shorter != min(photo.size):
        factor = shorter / min(photo.size)
        size = round(photo.height * factor), round(photo.width * factor)
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return normalize(pixels, preprocess.mean, preprocess.std)


def compare(
    name: str, runner: OnnxModel | Callable[[Tensor], Any], reference: nn.Module, ours: np.ndarray, theirs: Tensor
) -> Comparison:
    """Run both; class indices are left out, since scores that tie may swap them."""
    outputs = runner(ours) if isinstance(runner, OnnxModel) else runner(torch.from_numpy(ours))
    expected = reference(theirs)
    pairs = zip(_list(outputs), _list(expected), strict=True)
    differences, largest = [], []
    for actual, target in pairs:
        if target.is_floating_point():
            differences.append(
                float((torch.as_tensor(actual) - target).abs().max() / target.abs().max().clamp(min=1e-6))
            )
            largest.append(float(target.abs().max()))
    index = int(np.argmax(differences))
    shape = ours.shape
    return Comparison(name, shape[0], shape[-2], shape[-1], differences[index] * largest[index], largest[index])


def _list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
