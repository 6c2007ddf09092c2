"""Predict with an exported ONNX file: numpy, Pillow and onnxruntime, no torch.

Preprocessing follows the file's metadata and has the values of the PyTorch path: Pillow resizes for classifiers, and
`resize` computes what `torch.nn.functional.interpolate` computes for segmenters and detectors.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade._errors import UsageError
from saccade._extras import require
from saccade.inference.onnx_regions import Objects, RegionSessions, encode_masks, paste_masks

METADATA = "saccade"  # key of the JSON that saccade.inference.export writes
MIN_BOX_SIDE = 1e-2  # smaller boxes are dropped, as in `SparseDetector.decode`


class OnnxModel:
    """An exported model in an ONNX Runtime session.

    Args:
        threads: of one operator; None lets ONNX Runtime choose.
    """

    def __init__(self, path: str | os.PathLike, threads: int | None = None):
        self.session = open_session(Path(path), threads)
        properties = self.session.get_modelmeta().custom_metadata_map
        if METADATA not in properties:
            raise ValueError(f"{path} has no metadata of saccade. Write it with `saccade export`.")
        self.metadata: dict[str, Any] = json.loads(properties[METADATA])
        if "part" in self.metadata:
            raise ValueError(f"{path} is a part of {self.metadata['of']}. Use that file.")
        self.task: str = self.metadata["task"]
        self.classes: list[str] = self.metadata["classes"]
        self.preparation: dict[str, Any] = self.metadata["preprocess"]
        self.regions: RegionSessions | None = None
        if "graphs" in self.metadata:  # Mask R-CNN
            self.regions = RegionSessions(Path(path), self.metadata, lambda part: open_session(part, threads))

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        """Run the graph on images (B, 3, H, W), or clips (B, 3, T, H, W)."""
        shape: list[int | str] = self.metadata["input"]
        fixed = [
            isinstance(expected, int) and expected != actual
            for expected, actual in zip(shape, images.shape, strict=False)
        ]
        if len(shape) != images.ndim or any(fixed):
            raise ValueError(
                f"expected images of shape {tuple(shape)}, got {images.shape}. Export with --dynamic batch,size."
            )
        return self.session.run(None, {"images": images})

    def preprocess(self, image: Image.Image, size: int | None = None) -> np.ndarray:
        """An RGB image -> the graph's input (1, 3, H, W); `size` replaces the size of the metadata."""
        if self.preparation["in_graph"]:
            if size:
                raise UsageError(f"--size {size} is not available: this file resizes images itself.")
            return to_array(image)[None]
        if self.task == "classification":
            return self.normalize(to_array(centre_crop(image, self.preparation, size))[None].astype(np.float32) / 255)
        pixels = to_array(image)[None].astype(np.float32) / 255
        height, width = self.input_size(image.height, image.width, size)
        if self.task == "detection":  # torchvision normalises before it resizes
            return resize(self.normalize(pixels), height, width, antialias=False)
        return self.normalize(resize(pixels, height, width, antialias=True))

    def normalize(self, pixels: np.ndarray) -> np.ndarray:
        mean, std = (np.array(self.preparation[key], np.float32)[:, None, None] for key in ("mean", "std"))
        return (pixels - mean) / std

    def input_size(self, height: int, width: int, size: int | None = None) -> tuple[int, int]:
        """Height and width at which a segmenter or detector processes an image."""
        if self.task == "segmentation":
            shorter = size or self.preparation["shorter"]
            if shorter is None or shorter == min(height, width):
                return height, width
            factor = shorter / min(height, width)
            return round(height * factor), round(width * factor)
        shortest, longest = size or self.preparation["min_size"], self.preparation["max_size"]
        scale = min(shortest / min(height, width), longest / max(height, width))
        return int(height * scale), int(width * scale)  # torchvision rounds down

    @property
    def multi_label(self) -> bool:
        return self.metadata.get("multi_label", False)

    def classify(
        self, image: Image.Image, top: int = 5, size: int | None = None, threshold: float = 0.5
    ) -> dict[str, Any]:
        """The most probable classes; of a multi-label model also those with at least `threshold`."""
        (logits,) = self(self.preprocess(image, size))
        logits = logits[0].astype(np.float32)
        probabilities = 1 / (1 + np.exp(-logits)) if self.multi_label else softmax(logits, axis=0)
        order = np.argsort(-probabilities, kind="stable")[:top].tolist()
        classes = [
            {"class": index, "name": self.classes[index], "probability": float(probabilities[index])} for index in order
        ]
        selected = np.flatnonzero(probabilities >= threshold).tolist()
        labels = {"labels": [self.classes[index] for index in selected]} if self.multi_label else {}
        return {"classes": classes} | labels

    def segment(self, image: Image.Image, size: int | None = None) -> np.ndarray:
        """The class of every pixel (H, W), uint8 or, for more than 256 classes, uint16."""
        (logits,) = self(self.preprocess(image, size))
        if logits.shape[2:] != (image.height, image.width):
            logits = resize(softmax(logits, axis=1), image.height, image.width, antialias=False)
        return logits[0].argmax(0).astype(np.uint8 if logits.shape[1] <= 256 else np.uint16)

    def detect(self, image: Image.Image, threshold: float = 0.5, size: int | None = None) -> list[dict[str, Any]]:
        """Objects with a score of at least `threshold`, by descending score: label, name, score, box in pixels.

        Objects of Mask R-CNN also have their mask as `segmentation`, in COCO's run-length encoding.
        """
        images = self.preprocess(image, size)
        (detected,) = self.objects(images, threshold)
        boxes = rescale_boxes(detected.boxes, images.shape[2:], (image.height, image.width))
        entries = [
            {"label": int(label), "name": self.classes[int(label) - 1], "score": float(score), "box": box.tolist()}
            for label, score, box in zip(detected.labels, detected.scores, boxes, strict=True)
        ]
        if detected.masks is not None:
            codes = encode_masks(paste_masks(detected.masks, boxes, image.height, image.width))
            entries = [entry | {"segmentation": code} for entry, code in zip(entries, codes, strict=True)]
        return entries

    def objects(self, images: np.ndarray, threshold: float = 0.0) -> list[Objects]:
        """Objects of prepared images (B, 3, H, W), in pixels of these."""
        outputs = self(images)
        if self.regions is not None:
            detected = self.regions(outputs, (images.shape[2], images.shape[3]))
        else:
            minimum = self.metadata["score_thresh"]
            detected = [
                select_tokens(boxes, labels, scores, minimum) for boxes, labels, scores in zip(*outputs, strict=True)
            ]
        return [select(image, image.scores >= threshold) for image in detected]


def open_session(path: Path, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU."""
    runtime = require("onnxruntime", "export")
    if not path.is_file():
        raise ValueError(f"no such file: {path}.")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings name float16 kernels that the CPU lacks
    if threads:
        options.intra_op_num_threads = threads
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no public base class
        raise ValueError(f"{path} is not a readable ONNX file: {str(error).splitlines()[0]}") from error


def select_tokens(boxes: np.ndarray, labels: np.ndarray, scores: np.ndarray, score_thresh: float) -> Objects:
    """Outputs of a sparse detector for one image -> its objects, most certain first."""
    valid = ((boxes[:, 2:] - boxes[:, :2]).min(1) >= MIN_BOX_SIDE) & (scores > score_thresh)
    order = np.flatnonzero(valid)[np.argsort(-scores[valid], kind="stable")]
    return Objects(boxes[order], labels[order], scores[order])


def rescale_boxes(boxes: np.ndarray, size: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """Boxes (n, 4) in an image of `size` (height, width) -> in the same image of the new size."""
    return boxes * np.array([new[1] / size[1], new[0] / size[0]] * 2, np.float32)


def select(objects: Objects, chosen: np.ndarray) -> Objects:
    masks = None if objects.masks is None else objects.masks[chosen]
    return Objects(objects.boxes[chosen], objects.labels[chosen], objects.scores[chosen], masks)


def to_array(image: Image.Image) -> np.ndarray:
    """An RGB image as uint8 (3, H, W)."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def centre_crop(image: Image.Image, preparation: dict[str, Any], size: int | None = None) -> Image.Image:
    """Resize the shorter side, then crop the centre, as timm's evaluation transform does."""
    side, shorter = preparation["size"], preparation["shorter"]
    if size:
        side, shorter = size, int(size / preparation["crop_pct"])
    width, height = image.size
    if min(width, height) != shorter:
        short = min(width, height)
        new = (int(shorter * width / short), int(shorter * height / short))
        image = image.resize(new, Image.Resampling[preparation["interpolation"].upper()])
    left, top = round((image.width - side) / 2), round((image.height - side) / 2)
    return image.crop((left, top, left + side, top + side))


def resize(pixels: np.ndarray, height: int, width: int, antialias: bool) -> np.ndarray:
    """pixels (B, C, h, w) -> (B, C, H, W), bilinear with half-pixel centres."""
    if pixels.shape[2:] == (height, width):
        return pixels
    weights = antialiased_weights if antialias else linear_weights
    rows, columns = weights(pixels.shape[2], height), weights(pixels.shape[3], width)
    return rows @ (pixels @ columns.T)


def linear_weights(length: int, resized: int) -> np.ndarray:
    """(resized, length): two neighbours of every centre, clamped at the ends.

    As in ATen the scale is a float32, and the coordinate is rounded to float32 once (a fused multiply-add).
    """
    scale = float(np.float32(length) / np.float32(resized))
    at = np.maximum(scale * (np.arange(resized) + 0.5) - 0.5, 0).astype(np.float32)
    low = np.minimum(at.astype(np.int64), length - 1)
    weights = np.zeros((resized, length), np.float32)
    index = np.arange(resized)
    np.add.at(weights, (index, low), 1 - (at - low.astype(np.float32)))
    np.add.at(weights, (index, np.minimum(low + 1, length - 1)), at - low.astype(np.float32))
    return weights


def antialiased_weights(length: int, resized: int) -> np.ndarray:
    """(resized, length): a triangle of radius max(1, length / resized) around every centre, normalised."""
    scale = np.float32(length) / np.float32(resized)
    centre = scale * (np.arange(resized, dtype=np.float32) + np.float32(0.5))
    offset = np.arange(length, dtype=np.float32) - centre[:, None] + np.float32(0.5)
    weights = np.clip(1 - np.abs(offset) / np.maximum(scale, np.float32(1)), 0, None)
    return weights / weights.sum(1, keepdims=True)


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def class_areas(labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes present and the fraction of the image ("share") each covers, largest first."""
    counts = np.bincount(labels.flatten(), minlength=len(classes))
    order = np.argsort(-counts, kind="stable").tolist()
    return [
        {"class": index, "name": classes[index], "pixels": int(counts[index]), "share": counts[index] / labels.size}
        for index in order
        if counts[index]
    ]
