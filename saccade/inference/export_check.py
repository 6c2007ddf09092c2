"""Compare an exported file with its PyTorch model on the bundled photographs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.data.decode.image import read_image
from saccade.data.synthetic.photos import photo_paths
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.image import eval_transform
from saccade.heads.mask_rcnn import RegionDetector
from saccade.inference.export import DetectorGraph, shorter_side
from saccade.inference.onnx_predict import OnnxModel, rescale_boxes, to_array
from saccade.inference.onnx_regions import Objects, paste_masks, select_proposals
from saccade.inference.region_graphs import MaskGraph, ProposalGraph, RegionGraph
from saccade.models.card import Card
from saccade.tasks.predict import predict
from saccade.tasks.results import Detections
from saccade.tasks.sparse_detector import SparseDetector

TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "int8": 2e-1}  # of the largest output of the PyTorch model
IN_GRAPH_TOLERANCE = 5e-3  # with preprocessing in the graph: resized pixels may differ by one of 256 levels
BATCHES = (1, 3, 4)  # the example has 2 images
# Of boxes, in units of the image, and of scores: objects further apart are not the same.
MAX_DISTANCE = {"float32": 2e-2, "float16": 1e-1, "int8": 2e-1}


class Comparison(NamedTuple):
    """The largest difference of two outputs for one input shape.

    `inputs` is "images": same pixels for both, or "photographs": each from the file through its own preprocessing. For
    Mask R-CNN, "proposals", "regions" and "masks" compare its graphs on the same inputs, and "objects" and
    "photographs" what is predicted with them, with the quantity that differs most.
    """

    inputs: str
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
    if isinstance(model, RegionDetector):
        return check_regions(path, model, card, metadata, batches, sizes)
    is_onnx = Path(path).suffix != ".pt2"
    runner: Any = OnnxModel(path) if is_onnx else torch.export.load(path).module()
    model = model.cpu().eval()
    reference = DetectorGraph(model).eval() if isinstance(model, SparseDetector) else model
    photos = [read_image(photo) for photo in photo_paths().values()]
    shape: list[int | str] = metadata["input"]
    batches, sizes = dynamic_shapes(shape, batches, sizes or check_sizes(card.preprocess.size))
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


def check_regions(
    path: str | Path,
    model: RegionDetector,
    card: Card,
    metadata: dict[str, Any],
    batches: Sequence[int] = BATCHES,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> list[Comparison]:
    """Compare the graphs of Mask R-CNN with PyTorch's on the same inputs, and objects with `saccade.predict`."""
    runner, model = OnnxModel(path), model.cpu().eval()
    photos = [read_image(photo) for photo in photo_paths().values()]
    shape: list[int | str] = metadata["input"]
    batches, sizes = dynamic_shapes(shape, batches, sizes or check_sizes(card.preprocess.size))
    rows = []
    for height, width in sizes:
        for batch in batches:
            images = [photo.resize((width, height), Image.Resampling.BICUBIC) for photo in repeat(photos, batch)]
            inputs = np.concatenate([runner.preprocess(image, min(height, width)) for image in images])
            rows += compare_graphs(runner, model, inputs)
            rows.append(compare_objects("objects", runner, model, images, inputs, min(height, width)))
    if shape[-1] == "width" and shape[0] == "batch":
        for photo in photos:
            rows.append(compare_objects("photographs", runner, model, [photo], runner.preprocess(photo)))
    return rows


@torch.no_grad()
def compare_graphs(runner: OnnxModel, model: RegionDetector, images: np.ndarray) -> list[Comparison]:
    """The graphs on images (B, 3, H, W), on PyTorch's proposals, and on the best class of each of them."""
    assert runner.regions is not None
    expected = ProposalGraph(model)(torch.from_numpy(images))
    rows = [compare_outputs("proposals", images.shape, runner(images), expected)]
    objectness, boxes, levels, *features = (output.numpy() for output in expected)
    settings = runner.metadata["selection"]
    proposals = [select_proposals(*image, levels, settings) for image in zip(objectness, boxes, strict=True)]
    sizes = np.array([images.shape[2:]] * len(images), np.float32)
    inputs = [*expected[-len(features) :], torch.from_numpy(np.concatenate(proposals))]
    index = np.repeat(np.arange(len(images)), [len(part) for part in proposals])
    inputs.append(torch.from_numpy(index))
    expected = RegionGraph(model)(*inputs, torch.from_numpy(sizes))
    actual = runner.regions.run("regions", features, proposals, sizes)
    rows.append(compare_outputs("regions", images.shape, actual, expected))
    if "masks" in runner.regions.sessions:
        labels = expected[0].argmax(1) + 1
        actual = runner.regions.run("masks", features, proposals, labels.numpy())
        rows.append(compare_outputs("masks", images.shape, actual, [MaskGraph(model)(*inputs, labels)]))
    return rows


def compare_objects(
    name: str,
    runner: OnnxModel,
    model: RegionDetector,
    photos: Sequence[Image.Image],
    images: np.ndarray,
    size: int | None = None,
) -> Comparison:
    """Objects of the file with those of `saccade.predict`, whatever their score; the quantity that differs most."""
    predicted = predict(model, photos, batch_size=len(photos), threshold=0.0, size=size)
    largest = {"scores": 0.0}
    for expected, actual in zip(predicted, runner.objects(images), strict=True):
        boxes = rescale_boxes(actual.boxes, images.shape[2:], photos[0].size[::-1])
        objects = differences(cast(Detections, expected), actual._replace(boxes=boxes), runner.metadata)
        largest = {key: max(largest.get(key, 0.0), value) for key, value in (largest | objects).items()}
    worst = max(largest, key=lambda key: largest[key])
    return Comparison(f"{name}, {worst}", len(photos), images.shape[2], images.shape[3], largest[worst], 1.0)


def differences(expected: Detections, actual: Objects, metadata: dict[str, Any]) -> dict[str, float]:
    """The largest difference of boxes (in units of the image) and scores, and the mean of masks (pixels that differ).

    Every object is compared with the most similar one of its class. The difference of an object without a counterpart
    is how far its score is above the lowest one that is returned. In float16 and int8 the mean over the objects
    counts: rounding decides which of two overlapping boxes of nearly the same score is suppressed.
    """
    settings, exact = metadata["selection"], metadata["dtype"] == "float32"
    boxes, scores = expected.boxes.numpy() / max(expected.size), expected.scores.numpy()
    distance = np.abs(boxes[:, None] - actual.boxes / max(expected.size)).max(2, initial=0)  # (n, m)
    distance = np.maximum(distance, np.abs(scores[:, None] - actual.scores))
    distance[expected.labels.numpy()[:, None] != actual.labels] = np.inf
    pairs = []
    for i in range(len(distance)):  # by descending score
        j = int(distance[i].argmin()) if distance.shape[1] else 0
        if distance.shape[1] and distance[i, j] <= MAX_DISTANCE[metadata["dtype"]]:
            pairs.append((i, j))
            distance[:, j] = np.inf
    ours, theirs = (np.array([pair[side] for pair in pairs], np.int64) for side in (1, 0))
    count = max(len(scores), len(actual.scores), 1)

    def reduce(values: np.ndarray) -> float:
        return float(values.max(initial=0) if exact else values.sum() / count)

    result = {
        "boxes": reduce(np.abs(actual.boxes[ours] / max(expected.size) - boxes[theirs]).max(1, initial=0)),
        "scores": reduce(np.abs(actual.scores[ours] - scores[theirs])),
    }
    if expected.masks is not None and actual.masks is not None and pairs:
        width, height = expected.size
        masks = paste_masks(actual.masks[ours], expected.boxes.numpy()[theirs], height, width)
        truth = expected.masks.numpy()[theirs]
        differ, area = (masks ^ truth).sum((1, 2)), (masks | truth).sum((1, 2))
        result["masks"] = float((differ / np.maximum(area, 1)).mean())
    missing = []
    for values, matched in ((scores, theirs), (actual.scores, ours)):
        full = len(values) >= settings["box_detections_per_img"]
        lowest = values.min() if full else settings["box_score_thresh"]
        missing += (np.delete(values, matched) - lowest).tolist()
    return result | {"missing objects": reduce(np.array(missing))}


def dynamic_shapes(
    shape: Sequence[int | str], batches: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
    """Batch sizes and sizes to compare at: those of the file where it fixes them."""
    batches = batches if shape[0] == "batch" else [int(shape[0])]
    return batches, sizes if shape[-1] == "width" else [(int(shape[-2]), int(shape[-1]))]


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
    """Run both."""
    outputs = runner(ours) if isinstance(runner, OnnxModel) else runner(torch.from_numpy(ours))
    return compare_outputs(name, ours.shape, _list(outputs), _list(reference(theirs)))


def compare_outputs(name: str, shape: Sequence[int], outputs: Sequence[Any], expected: Sequence[Tensor]) -> Comparison:
    """The output that differs most; class indices are left out, since scores that tie may swap them."""
    differences, largest = [], []
    for actual, target in zip(outputs, expected, strict=True):
        if target.is_floating_point():
            differences.append(
                float((torch.as_tensor(actual) - target).abs().max() / target.abs().max().clamp(min=1e-6))
            )
            largest.append(float(target.abs().max()))
    index = int(np.argmax(differences))
    return Comparison(name, shape[0], shape[-2], shape[-1], differences[index] * largest[index], largest[index])


def _list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
