"""Rows of batch prediction: the columns of every task, and a predictor that returns rows. All engines share them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade._errors import UsageError
from saccade._extras import require
from saccade.explanation.hooks.record import record
from saccade.models.card import Card
from saccade.tasks.load import card_of
from saccade.tasks.predict import (
    PREDICTORS,
    ClassPredictor,
    PredictOptions,
    Predictor,
    Sample,
    embed_images,
    make_predictor,
)
from saccade.tasks.results import Unreadable, png_bytes
from saccade.tokens.trace import RegionTrace, Trace

TASKS = {"classify": "classification", "embed": "classification", "segment": "segmentation", "detect": "detection"}
BATCH_SIZES = {"classify": 64, "embed": 64, "segment": 8, "detect": 8}


class Row(NamedTuple):
    """The row of one image: the values of its task's columns, or an error."""

    source: Any  # the input as passed; an `Input` in batch prediction
    values: dict[str, Any]
    error: str | None = None


class Embedding(NamedTuple):
    """The features of one image before the classifier."""

    name: str
    source: Any
    vector: Any  # (D,) float32


class EmbedPredictor(ClassPredictor):
    """Features only: one forward pass, without the classifier."""

    def _predict(self, samples: Sequence[Sample]) -> list[Any]:
        pixels = torch.stack([sample.pixels for sample in samples]).to(self.device)
        vectors = embed_images(self.model, pixels, self.preprocess).cpu().numpy()
        return [Embedding(s.name, s.source, vector) for s, vector in zip(samples, vectors, strict=True)]


class RowPredictor:
    """A model that turns samples into rows; what a batch raises is the error of the images that cause it."""

    def __init__(
        self,
        model: nn.Module,
        task: str,
        options: PredictOptions,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        tokens: bool = False,
    ):
        base = make_predictor(model, options, device, dtype)
        self.predictor = EmbedPredictor(base.model, base.card, options, dtype) if task == "embed" else base
        self.read = self.predictor.read
        self.tokens = tokens
        self.schema, self.values_of = columns_of(task, card_of(model), tokens)

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        try:
            return self._predict(samples)
        except torch.cuda.OutOfMemoryError:
            raise  # a smaller batch_size helps; the images are fine
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            if len(samples) > 1:
                return [self([sample])[0] for sample in samples]
            reason = " ".join(str(error).split())
            return [Unreadable(samples[0].name, samples[0].source, f"{samples[0].name}: {reason}")]

    def _predict(self, samples: Sequence[Sample]) -> list[Any]:
        if not self.tokens:
            return [Row(result.source, self.values_of(result)) for result in self.predictor(samples)]
        with record(self.predictor.model) as traces:
            results = self.predictor(samples)
        summaries = summarize_tokens(traces[-1])
        return [
            Row(result.source, self.values_of(result) | summary)
            for result, summary in zip(results, summaries, strict=True)
        ]

    def table_row(self, result: Row | Unreadable) -> dict[str, Any]:
        """A result as a row of the Parquet file."""
        item: Any = result.source
        row = dict.fromkeys(self.schema.names) | {"id": item.id, "name": item.name, "error": result.error}
        return row | result.values if isinstance(result, Row) else row


def make_reader(card: Card, options: PredictOptions) -> Predictor:
    """A predictor that decodes and prepares images, without the model."""
    return PREDICTORS[card.task](nn.Identity(), card, options)


def choose_task(task: str | None, card: Card) -> str:
    """The task that was requested or else the model's own; raises if the model has another."""
    task = task or next(name for name, task_of in TASKS.items() if task_of == card.task)
    if TASKS.get(task) != card.task or card.preprocess.frames:
        kind = "video classification" if card.preprocess.frames else card.task
        allowed = [name for name, task_of in TASKS.items() if task_of == kind]
        raise UsageError(f"expected task {' or '.join(allowed) or 'of an image model'} for {kind}, got {task}.")
    return task


def check_tokens(task: str, options: PredictOptions) -> None:
    """Raise where one image has several grouping steps that compete: windows, padding, mirrored images."""
    if task not in ("classify", "embed") or options.flip:
        cause = f"task {task}" if task not in ("classify", "embed") else "flip"
        raise UsageError(f"tokens needs task classify or embed without flip, got {cause}. Use saccade.record.")


def columns_of(task: str, card: Card, tokens: bool = False) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
    """The Arrow schema of a task, and the function from a result to the values of its own columns."""
    pa = require("pyarrow", "train")
    common = [pa.field("id", pa.int64(), False), pa.field("name", pa.string(), False), pa.field("error", pa.string())]
    fields: list[tuple[str, Any]]
    if task == "classify":
        fields = [("label", pa.string()), ("probability", pa.float32())]
        fields += [("classes", pa.list_(pa.int32())), ("probabilities", pa.list_(pa.float32()))]
        fields += [("labels", pa.list_(pa.string()))] if card.multi_label else []
        row = _classification_row
    elif task == "embed":
        fields, row = [("embedding", pa.list_(pa.float32()))], _embedding_row
    elif task == "segment":
        fields = [("width", pa.int32()), ("height", pa.int32()), ("mask", pa.binary())]
        row = _segmentation_row
    else:
        fields = [("width", pa.int32()), ("height", pa.int32()), ("boxes", pa.list_(pa.list_(pa.float32(), 4)))]
        fields += [("classes", pa.list_(pa.int32())), ("labels", pa.list_(pa.string()))]
        fields += [("scores", pa.list_(pa.float32())), ("masks", pa.list_(pa.string()))]
        row = _detection_row
    if tokens:
        fields += [("token_centres", pa.list_(pa.list_(pa.float32(), 2))), ("token_areas", pa.list_(pa.float32()))]
        fields += [("token_norms", pa.list_(pa.float32())), ("token_regions", pa.list_(pa.list_(pa.float32(), 4)))]
    metadata = {"saccade.task": task, "saccade.model": card.name, "saccade.classes": json.dumps(card.names)}
    return pa.schema(common + [pa.field(*field) for field in fields], metadata), row


def _classification_row(result: Any) -> dict[str, Any]:
    return {
        "label": result.label,
        "probability": result.probability,
        "classes": [entry.index for entry in result.classes],  # most probable first
        "probabilities": [entry.probability for entry in result.classes],
    } | ({} if result.labels is None else {"labels": result.labels})


def _embedding_row(result: Any) -> dict[str, Any]:
    return {"embedding": result.vector.tolist()}


def _segmentation_row(result: Any) -> dict[str, Any]:
    """The mask is a palette PNG of class indices."""
    height, width = result.labels.shape
    return {"width": width, "height": height, "mask": png_bytes(result.palette_image())}


def _detection_row(result: Any) -> dict[str, Any]:
    """Boxes are x0 y0 x1 y1 in pixels, classes count from 1, masks are the counts of COCO's run lengths."""
    from saccade.tasks.coco_metric import encode_masks

    (width, height), labels, names = result.size, result.labels.tolist(), result.names
    masks = None if result.masks is None else [code["counts"] for code in encode_masks(result.masks)]
    return {
        "width": width,
        "height": height,
        "boxes": result.boxes.float().tolist(),
        "classes": labels,
        "labels": [names[label - 1] if label <= len(names) else str(label) for label in labels],
        "scores": result.scores.tolist(),
        "masks": masks,
    }


def summarize_tokens(trace: Trace) -> list[dict[str, Any]]:
    """Per image: centre, area and norm of every token of a grouping step, in units of the model's input.

    A SparseFormer token has the centre and area of its region, and the region itself. A token of VT, PaCa or SViT has
    the mean position of its map, and the area that a uniform map of the same concentration would cover:
    1 / (N Σ p²) for a map p over N pixels that sums to 1. Norms are those of the token vectors.
    """
    if trace.tokens is None:
        raise ValueError(f"expected tokens in the trace of {trace.name}, got none.")
    norms = trace.tokens.float().norm(dim=-1).cpu()  # (B, M)
    if isinstance(trace, RegionTrace):
        regions = trace.regions.float().cpu()
        centres = (regions[..., :2] + regions[..., 2:]) / 2
        areas = (regions[..., 2:] - regions[..., :2]).clamp(min=0).prod(-1)
        columns: tuple[Any, ...] = (centres, areas, norms, regions)
    else:
        measured = [_map_statistics(maps) for maps in _maps_per_image(trace)]
        columns = (*(torch.stack(values) for values in zip(*measured, strict=True)), norms, [None] * len(norms))
    names = ("token_centres", "token_areas", "token_norms", "token_regions")
    return [
        {name: None if value is None else value.tolist() for name, value in zip(names, values, strict=True)}
        for values in zip(*columns, strict=True)
    ]


def _maps_per_image(trace: Trace) -> Any:
    """(M, H, W) of one image after the other: the maps of all images of a batch can be large."""
    key = "association" if hasattr(trace, "association") else "assignment"
    for values in getattr(trace, key).split(1):
        yield trace._replace(**{key: values}).maps()[0].float().cpu()


def _map_statistics(maps: Tensor) -> tuple[Tensor, Tensor]:
    """maps (M, H, W) -> centres (M, 2) as x y, areas (M,), in units of the image."""
    _, height, width = maps.shape
    mass = maps / maps.sum((1, 2), keepdim=True).clamp(min=1e-12)
    x = (torch.arange(width) + 0.5) / width
    y = (torch.arange(height) + 0.5) / height
    centres = torch.stack((mass.sum(1) @ x, mass.sum(2) @ y), 1)
    return centres, 1 / (height * width * mass.square().sum((1, 2)).clamp(min=1e-12))
