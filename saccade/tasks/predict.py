"""`saccade.predict`: images or videos through a model of any task, to typed results.

One predictor per task reads an input, runs a batch and wraps its outputs. The command line, the page, batch prediction
and the evaluation of data sets run models through these classes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade._errors import UsageError
from saccade.data.decode.inputs import ImageInput, VideoInput, input_name, list_inputs, read_input, read_video_input
from saccade.data.sources.class_names import flipped_classes
from saccade.data.transforms.batch import normalize, resize
from saccade.data.transforms.clips import EvalClip
from saccade.data.transforms.image import eval_transform
from saccade.models.card import Card, Preprocess
from saccade.tasks.load import card_of, load
from saccade.tasks.results import (
    Classification,
    ClassScore,
    ClipPrediction,
    Detections,
    Prediction,
    Predictions,
    Segmentation,
    Unreadable,
)
from saccade.tasks.segmentation_drawing import label_dtype
from saccade.tasks.segmentation_inference import InferenceOptions, predict_labels, predict_probabilities
from saccade.tasks.video import average_views

MAX_PIXELS = 2_000_000  # larger images are segmented in windows unless a window is given
DECODE_THREADS = 4


class PredictOptions(NamedTuple):
    """Options of a prediction; those of other tasks must keep their defaults."""

    size: int | None = None  # of the input; default: the card's
    top: int = 5  # classes per image
    embed: bool = False  # return the features before the classifier too
    views: tuple[int, int] = (1, 1)  # temporal clips and spatial crops per video
    threshold: float = 0.5  # minimum score of a detection, or of a label of a multi-label model
    window: int | None = None  # side of a sliding window; None: only for large images, 0: never
    stride: int = 0  # of the window; 0: 2/3 of it
    scales: tuple[float, ...] = (1.0,)  # average over resized images
    flip: bool = False  # average with the mirrored image
    every: float = 1.0  # seconds between the frames of a video file that an image model reads


TASKS_OF = {
    "top": ("classification",),
    "embed": ("classification",),
    "views": ("classification",),
    "threshold": ("classification", "detection"),
    "window": ("segmentation",),
    "stride": ("segmentation",),
    "scales": ("segmentation",),
    "flip": ("classification", "segmentation"),
    "crop_pct": ("classification",),
    "max_detections": ("detection",),
}


def predict(
    model: nn.Module | str | os.PathLike,
    images: ImageInput | VideoInput | Iterable[ImageInput | VideoInput],
    *,
    batch_size: int = 16,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Predictions:
    """Predict classes, segmentations or objects.

    Returns one `Classification`, `ClipPrediction`, `Segmentation` or `Detections` per input, in order. Inputs that
    cannot be read are in `.skipped` with the reason; if there is no other, the reason is raised as ValueError.

    Args:
        model: a model, or what `saccade.load` takes.
        images: paths, URLs, folders, Pillow images, arrays (H, W, 3) or tensors (3, H, W); one or many. Of a video file
            an image model reads one frame per second (`every`). Video models take video files, arrays (T, H, W, 3) or
            tensors (3, T, H, W).
        batch_size: inputs per forward pass.
        device: default: where the model is.
        dtype: of autocast; None computes in the model's own dtype.
        on_progress: called with the number of inputs done and their total.
        options: of `PredictOptions`: size; top, embed, views (classification); window, stride, scales
            (segmentation); flip (both); threshold (detection, multi-label models); every (video files).

    Example:
        >>> saccade.predict("svit_nano", saccade.data.photo_paths()["coffee"])[0].label
        'espresso'
    """
    predictor = make_predictor(model, PredictOptions(**options), device, dtype)
    inputs = list_inputs(images, predictor.is_video, predictor.options.every)
    if not inputs:
        raise ValueError("expected at least one image, got none.")
    predictions = Predictions()
    for done, result in enumerate(predict_stream(predictor, inputs, batch_size), 1):
        if isinstance(result, Unreadable):
            predictions.skipped.append(result)
        else:
            predictions.append(result)
        if on_progress:
            on_progress(done, len(inputs))
    if not predictions:
        raise ValueError(f"none of the {len(inputs)} inputs could be read: {predictions.skipped[0].error}")
    return predictions


def predict_stream(
    model: "nn.Module | str | os.PathLike | Predictor",
    images: Iterable[Any],
    batch_size: int = 16,
    threads: int = DECODE_THREADS,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Iterator[Prediction | Unreadable]:
    """Predict as `saccade.predict`, one result at a time, for more inputs than fit into memory.

    Yields a prediction or an `Unreadable` per input, in order, with at most three batches in memory: threads decode
    ahead of the model. `images` are single inputs, also from a generator; folders and video files are not expanded.

    Example:
        >>> for result in saccade.predict_stream("svit_nano", saccade.data.photo_paths().values(), top=1):
        ...     row = result.to_dict()
        >>> row["image"]
        'rocket.jpg'
    """
    predictor: Any = model
    if isinstance(model, (nn.Module, str, os.PathLike)):
        predictor = make_predictor(model, PredictOptions(**options), device, dtype)
    iterator = iter(images)
    with ThreadPoolExecutor(threads) as pool:

        def submit() -> list[Any]:
            return [pool.submit(predictor.read, source) for source in islice(iterator, batch_size)]

        pending = submit()
        while pending:
            following = submit()
            samples = [future.result() for future in pending]
            readable = [sample for sample in samples if isinstance(sample, Sample)]
            results = iter(predictor(readable) if readable else ())
            for sample in samples:
                yield next(results) if isinstance(sample, Sample) else sample
            pending = following


class Sample(NamedTuple):
    """One input, read and prepared for batching."""

    name: str
    source: Any
    pixels: Tensor  # uint8
    size: tuple[int, int]  # width, height of the input


class Predictor:
    """A model of one task with its preprocessing: `read` inputs, then call the predictor on a batch of them."""

    task = ""

    def __init__(self, model: nn.Module, card: Card, options: PredictOptions, dtype: torch.dtype | None = None):
        self.model, self.card, self.options, self.dtype = model.eval(), card, options, dtype
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device

    @property
    def is_video(self) -> bool:
        return self.card.preprocess.frames > 0

    def read(self, source: Any) -> Sample | Unreadable:
        """Read one input; what is wrong with an unreadable one is returned, not raised."""
        try:
            return self._read(source)
        except (ValueError, OSError) as error:
            return Unreadable(input_name(source), source, str(error))

    @torch.inference_mode()
    def __call__(self, samples: Sequence[Sample]) -> list[Prediction]:
        with inference_autocast(self.device, self.dtype):
            return self._predict(samples)

    def _read(self, source: Any) -> Sample:
        image = read_input(source)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return Sample(input_name(source), source, pixels, image.size)

    def _predict(self, samples: Sequence[Sample]) -> list[Prediction]:
        raise NotImplementedError


class ClassPredictor(Predictor):
    """Classes of images or videos."""

    task = "classification"

    def __init__(self, *args: Any):
        super().__init__(*args)
        default = self.card.preprocess
        self.preprocess = default._replace(size=self.options.size or default.size)
        if self.options.views != (1, 1) and not self.is_video:
            raise UsageError("views applies to video models, not to image models.")
        if self.options.threshold != PredictOptions().threshold and not self.card.multi_label:
            raise UsageError("threshold applies to detection and multi-label models, not to classification. Remove it.")
        if self.options.every != PredictOptions().every and self.is_video:
            raise UsageError("every applies to image models, not to video models. Remove it.")
        self.transform = make_eval_transform(self.preprocess, self.options.views)

    def _read(self, source: Any) -> Sample:
        sample: Any = read_video_input(source) if self.is_video else read_input(source)
        size = (0, 0) if self.is_video else sample.size
        return Sample(input_name(source), source, self.transform(sample), size)

    def _predict(self, samples: Sequence[Sample]) -> list[Prediction]:
        pixels = torch.stack([sample.pixels for sample in samples]).to(self.device)
        embeddings: Any = [None] * len(samples)
        if self.options.embed:
            embeddings = embed_images(self.model, pixels, self.preprocess).cpu().numpy()
        multi_label = self.card.multi_label
        logits = predict_logits(self.model, pixels, self.preprocess, self.options.flip, multi_label).float()
        names, top = self.card.names, min(self.options.top, logits.shape[1])
        probabilities = (logits.sigmoid() if multi_label else logits.softmax(1)).cpu()
        results: list[Prediction] = []
        for sample, values, embedding in zip(samples, probabilities, embeddings, strict=True):
            best, indices = values.topk(top)
            rows = zip(indices.tolist(), best.tolist(), strict=True)
            classes = [ClassScore(index, names[index], value) for index, value in rows]
            common = (
                sample.name,
                sample.source,
                classes,
                values.numpy(),
                embedding,
                None,
                names if multi_label else None,
            )
            clips, crops = self.options.views
            clip = (self.preprocess.frames, clips * crops)
            result = ClipPrediction(*common, *clip) if self.is_video else Classification(*common)
            results.append(result.above(self.options.threshold) if multi_label else result)
        return results


class SegmentationPredictor(Predictor):
    """The class of every pixel."""

    task = "segmentation"

    def _predict(self, samples: Sequence[Sample]) -> list[Prediction]:
        results: list[Prediction] = []
        for group in _groups_of_one_size(samples):
            pixels = torch.stack([sample.pixels for sample in group]).to(self.device)
            labels = self.label_map(pixels).cpu().numpy().astype(label_dtype(self.card.num_classes))
            results += [
                Segmentation(sample.name, sample.source, label_map, self.card.names)
                for sample, label_map in zip(group, labels, strict=True)
            ]
        return results

    def label_map(self, pixels: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) -> class of every pixel (B, H, W)."""
        inputs = preprocess_images(pixels, self.card.preprocess, self.options.size or self.card.shorter)
        inference = self._inference(inputs.shape[2] * inputs.shape[3])
        if inputs.shape[2:] == pixels.shape[2:]:
            return predict_labels(self.model, inputs, inference, flipped_classes(self.card.names))
        return segment_batch(self.model, inputs, pixels.shape[2:], inference, self.card.names).argmax(1)

    def _inference(self, pixels: int) -> InferenceOptions:
        options, window = self.options, self.options.window
        if window is None:
            window = 0 if pixels <= MAX_PIXELS else max(512, -(-self.card.preprocess.size // 32) * 32)
        return InferenceOptions(window, options.stride, tuple(options.scales), options.flip)


class ObjectPredictor(Predictor):
    """Objects with their boxes, and masks if the model has them."""

    task = "detection"

    def _predict(self, samples: Sequence[Sample]) -> list[Prediction]:
        outputs = detect_objects(self.model, [sample.pixels for sample in samples], self.device, self.options.size)
        results: list[Prediction] = []
        for sample, output in zip(samples, outputs, strict=True):
            order = output["scores"].argsort(descending=True, stable=True)
            order = order[output["scores"][order] >= self.options.threshold]
            ordered = {key: value[order].cpu() for key, value in output.items()}
            masks = ordered["masks"][:, 0] >= 0.5 if "masks" in ordered else None
            tensors = (ordered["boxes"], ordered["labels"], ordered["scores"])
            results.append(Detections(sample.name, sample.source, *tensors, self.card.classes, masks, sample.size))
        return results


PREDICTORS = {cls.task: cls for cls in (ClassPredictor, SegmentationPredictor, ObjectPredictor)}


def make_predictor(
    model: nn.Module | str | os.PathLike,
    options: PredictOptions = PredictOptions(),  # noqa: B008
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Predictor:
    """The predictor of a model's task; raises for options of other tasks."""
    module = model if isinstance(model, nn.Module) else load(model)
    card = card_of(module)
    check_options(options._asdict(), PredictOptions._field_defaults, card.task)
    if device is not None:
        module = module.to(device)
    return PREDICTORS[card.task](module, card, options, dtype)


def check_options(options: dict[str, Any], defaults: dict[str, Any], task: str) -> None:
    """Raise ValueError for an option that was set but does not apply to the task."""
    for name, value in options.items():
        tasks = TASKS_OF.get(name, (task,))
        value = tuple(value) if isinstance(value, list) else value
        if task not in tasks and value != defaults[name]:
            raise UsageError(f"{name} applies to {' and '.join(tasks)}, not to {task}. Remove it.")
    if options.get("stride") and not options.get("window"):
        raise UsageError("stride is that of a sliding window. Add window, or remove it.")


def make_eval_transform(preprocess: Preprocess, views: tuple[int, int] = (1, 1)) -> Callable[..., Any]:
    """The evaluation transform of an image, or of a video with `views` temporal clips and spatial crops."""
    if not preprocess.frames:
        return eval_transform(preprocess.size, preprocess.crop_pct, preprocess.interpolation)
    size, frames, stride = preprocess.size, preprocess.frames, preprocess.stride
    return EvalClip(size, frames, stride, preprocess.crop_pct, preprocess.interpolation, *views)


def predict_logits(
    model: nn.Module, images: Tensor, preprocess: Preprocess, flip: bool = False, multi_label: bool = False
) -> Tensor:
    """uint8 images or clips (B, …), or V views of each (B, V, …) -> logits (B, K).

    The probabilities of views, and with `flip` of mirrored inputs, are averaged.
    """
    views = images.shape[1] if images.ndim > (5 if preprocess.frames > 1 else 4) else 0
    chunks = images.flatten(0, 1).split(len(images)) if views else (images,)
    outputs = []
    for chunk in chunks:
        pixels = normalize_pixels(chunk, preprocess)
        logits = model(pixels).float()
        if flip:
            logits = average_views(torch.stack((logits, model(pixels.flip(-1)).float()), 1), multi_label)
        outputs.append(logits)
    logits = torch.cat(outputs)
    return average_views(logits.unflatten(0, (-1, views)), multi_label) if views else logits


def embed_images(model: nn.Module, images: Tensor, preprocess: Preprocess) -> Tensor:
    """uint8 images or clips (B, …) -> the classifier's input features (B, D), by timm's methods."""
    classifier: Any = model
    if not hasattr(classifier, "forward_head"):
        raise ValueError(f"expected a model with timm's forward_head, got {type(model).__name__}.")
    features = classifier.forward_features(normalize_pixels(images, preprocess))
    return classifier.forward_head(features, pre_logits=True).float()


def normalize_pixels(images: Tensor, preprocess: Preprocess) -> Tensor:
    """uint8 images or clips -> normalised, resized if the loader has cached them at another size."""
    pixels = resize(images.float() / 255, preprocess.size).clamp(0, 1)
    return normalize(pixels, preprocess.mean, preprocess.std)


def preprocess_images(images: Tensor, preprocess: Preprocess, shorter: int | None = None) -> Tensor:
    """uint8 images (B, 3, H, W) of dense tasks -> normalised, resized to the shorter side if it is given."""
    pixels = images.float() / 255
    height, width = pixels.shape[2:]
    if shorter is not None and shorter != min(height, width):
        factor = shorter / min(height, width)
        pixels = F.interpolate(pixels, (round(height * factor), round(width * factor)), mode="bilinear", antialias=True)
    return normalize(pixels, preprocess.mean, preprocess.std)


def segment_batch(
    model: nn.Module,
    images: Tensor,
    size: tuple[int, ...] | torch.Size,
    inference: InferenceOptions,
    classes: list[str],
) -> Tensor:
    """Normalised images -> class probabilities (B, K, *size), at the size of the masks."""
    probabilities = predict_probabilities(model, images, inference, flipped_classes(classes))
    if probabilities.shape[2:] == torch.Size(size):
        return probabilities
    return F.interpolate(probabilities, tuple(size), mode="bilinear", align_corners=False)


def detect_objects(
    model: nn.Module, images: Sequence[Tensor], device: torch.device | str, size: int | None = None
) -> list[dict[str, Tensor]]:
    """uint8 images (3, H, W) -> torchvision's outputs; `size` is the shorter side of the model's input."""
    transform: Any = getattr(model, "transform", None)  # torchvision stores a tuple, but infers int
    if size is None or transform is None:
        return model([image.to(device).float() / 255 for image in images])
    before, transform.min_size = transform.min_size, (size,)
    try:
        return model([image.to(device).float() / 255 for image in images])
    finally:
        transform.min_size = before


def inference_autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to `dtype`, or no context for None."""
    return torch.autocast(torch.device(device).type, dtype) if dtype is not None else nullcontext()


def _groups_of_one_size(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Consecutive samples of the same size."""
    group: list[Sample] = []
    for sample in samples:
        if group and sample.pixels.shape != group[0].pixels.shape:
            yield group
            group = []
        group.append(sample)
    yield group
