"""Predict any number of images into Parquet files, in bounded memory; a run that was killed continues.

The images of a source (`data.open.inputs`) have ids from 0. Part k holds the rows of ids k * part_rows to
(k + 1) * part_rows - 1, in order, and is written atomically: a part that exists is complete. Rows therefore depend on
model, options and source alone, not on workers, interruptions or speed.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from saccade._extras import package_version, require
from saccade._files import replaced_file, write_json
from saccade.data.decode.inputs import Input
from saccade.data.open.inputs import Inputs
from saccade.models.card import Card
from saccade.tasks.load import card_of, load
from saccade.tasks.predict import (
    ClassPredictor,
    PredictOptions,
    Predictor,
    Sample,
    embed_images,
    make_predictor,
    predict_stream,
)
from saccade.tasks.results import Unreadable, png_bytes

TASKS = {"classify": "classification", "embed": "classification", "segment": "segmentation", "detect": "detection"}
BATCH_SIZES = {"classify": 64, "embed": 64, "segment": 8, "detect": 8}
PART_ROWS = 4096
JOB_FILE, SUMMARY_FILE = "_job.json", "_summary.json"  # readers of Parquet folders skip names that begin with _ or .


class BatchError(ValueError):
    """A folder that holds the results of another job, or is being written."""


class BatchSummary(NamedTuple):
    """The result of a run."""

    rows: int  # in the folder
    errors: int  # rows with an error
    predicted: int  # rows of this run; others were there before
    seconds: float


def predict_batch(
    model: nn.Module | str | os.PathLike,
    source: str | os.PathLike | Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    task: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    image_column: str | None = None,
    part_rows: int = PART_ROWS,
    progress: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> BatchSummary:
    """Predict all images of a source and write `out/part-*.parquet`, except for parts that an earlier run completed.

    Columns: id, name, error (null for a prediction), and those of `columns_of` for the task.

    Args:
        model: a model, or what `saccade.load` takes.
        source: folders, globs, files, Parquet, tar shards and URLs, as in `Inputs`.
        task: "classify", "embed", "segment" or "detect"; default: the model's own.
        batch_size: images per forward pass.
        workers: threads that decode; default: the number of cores.
        part_rows: rows per file; that of an earlier run has priority.
        progress: show a bar with speed and remaining time.
        on_progress: called with the number of rows done and their total.
        options: of `PredictOptions`.
    """
    module = model if isinstance(model, nn.Module) else load(model)
    card = card_of(module)
    task = task or next(name for name, task_of in TASKS.items() if task_of == card.task)
    if TASKS.get(task) != card.task or card.preprocess.frames:
        kind = "video classification" if card.preprocess.frames else card.task
        allowed = [name for name, task_of in TASKS.items() if task_of == kind]
        raise ValueError(f"expected task {' or '.join(allowed) or 'of an image model'} for {kind}, got {task}.")
    predictor = _TolerantPredictor(module, task, PredictOptions(**options), device, dtype)
    inputs, out = Inputs(source, image_column), Path(out)
    total, digest = inputs.summary()
    if not total:
        raise ValueError(f"expected images at {source}, got none.")
    job = {
        "model": card.name,
        "weights": weights_hash(module),
        "task": task,
        "options": PredictOptions(**options)._asdict() | {"dtype": str(dtype)},
        "source": {"images": total, "digest": digest},
        "part_rows": part_rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        job = _start_or_continue(out, json.loads(json.dumps(job)))
        writer = _PartWriter(out, job["part_rows"], total, columns_of(task, card))
        started, done = time.monotonic(), writer.rows_done
        size = batch_size or BATCH_SIZES[task]
        with _progress_bar(progress, total, done) as advance:
            threads = workers or os.cpu_count() or 1
            stream: Iterator[Any] = predict_stream(predictor, inputs.items(skip=writer), size, threads)  # type: ignore[arg-type]
            for result in stream:
                writer.add(result.source, result)
                done += 1
                advance(done, writer.errors)
                if on_progress:
                    on_progress(done, total)
        summary = BatchSummary(writer.rows_done, writer.errors, writer.rows_written, time.monotonic() - started)
        if summary.rows != total:
            raise BatchError(f"expected {total} rows in {out}, got {summary.rows}. The source changed during the run.")
        write_json(out / SUMMARY_FILE, summary._asdict())
    return summary


class Embedding(NamedTuple):
    """The features of one image before the classifier."""

    name: str
    source: Any
    vector: Any  # (D,) float32


class _EmbedPredictor(ClassPredictor):
    """Features only: one forward pass, without the classifier."""

    def _predict(self, samples: Sequence[Sample]) -> list[Any]:
        pixels = torch.stack([sample.pixels for sample in samples]).to(self.device)
        vectors = embed_images(self.model, pixels, self.preprocess).cpu().numpy()
        return [Embedding(s.name, s.source, vector) for s, vector in zip(samples, vectors, strict=True)]


class _TolerantPredictor:
    """A predictor that returns what a batch raises as the error of the images that cause it."""

    def __init__(
        self,
        model: nn.Module,
        task: str,
        options: PredictOptions,
        device: str | torch.device | None,
        dtype: torch.dtype | None,
    ):
        base = make_predictor(model, options, device, dtype)
        self.predictor: Predictor = base
        if task == "embed":
            self.predictor = _EmbedPredictor(base.model, base.card, options, dtype)
        self.read = self.predictor.read

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        try:
            return self.predictor(samples)
        except torch.cuda.OutOfMemoryError:
            raise  # a smaller batch_size helps; the images are fine
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            if len(samples) > 1:
                return [self([sample])[0] for sample in samples]
            reason = " ".join(str(error).split())
            return [Unreadable(samples[0].name, samples[0].source, f"{samples[0].name}: {reason}")]


def columns_of(task: str, card: Card) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
    """The Arrow schema of a task, and the function from a result to the values of its own columns."""
    pa = require("pyarrow", "train")
    common = [pa.field("id", pa.int64(), False), pa.field("name", pa.string(), False), pa.field("error", pa.string())]
    fields: list[tuple[str, Any]]
    if task == "classify":
        fields = [("label", pa.string()), ("probability", pa.float32())]
        fields += [("classes", pa.list_(pa.int32())), ("probabilities", pa.list_(pa.float32()))]
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
    metadata = {"saccade.task": task, "saccade.model": card.name, "saccade.classes": json.dumps(card.names)}
    return pa.schema(common + [pa.field(*field) for field in fields], metadata), row


def _classification_row(result: Any) -> dict[str, Any]:
    classes = [entry.index for entry in result.classes]  # most probable first
    probabilities = [entry.probability for entry in result.classes]
    return {
        "label": result.label,
        "probability": result.probability,
        "classes": classes,
        "probabilities": probabilities,
    }


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


class _PartWriter:
    """Collects rows and writes a part when all of its ids are there. `id in writer` tells whether a row is written."""

    def __init__(self, out: Path, part_rows: int, total: int, columns: tuple[Any, Callable[[Any], dict[str, Any]]]):
        self.out, self.part_rows, self.total = out, part_rows, total
        self.schema, self.to_row = columns
        pq = require("pyarrow.parquet", "train")
        for leftover in out.glob(".*.parquet"):  # of a run that was killed while writing
            leftover.unlink(missing_ok=True)
        self.done: set[int] = set()
        self.rows_done = self.errors = self.rows_written = 0
        for part in range(-(-total // part_rows)):
            if self.path(part).is_file():
                errors = pq.read_table(self.path(part), columns=["error"]).column("error")
                self.done.add(part)
                self.rows_done += len(errors)
                self.errors += len(errors) - errors.null_count
        self.rows: list[dict[str, Any]] = []

    def path(self, part: int) -> Path:
        return self.out / f"part-{part:08d}.parquet"

    def __contains__(self, item_id: object) -> bool:
        return isinstance(item_id, int) and item_id // self.part_rows in self.done

    def add(self, item: Input, result: Any) -> None:
        """Add the row of an image; ids ascend."""
        error = result.error if isinstance(result, Unreadable) else None
        row = dict.fromkeys(self.schema.names) | {"id": item.id, "name": item.name, "error": error}
        self.rows.append(row if error is not None else row | self.to_row(result))
        self.errors += error is not None
        if (item.id + 1) % self.part_rows == 0 or item.id + 1 == self.total:
            self._write(item.id // self.part_rows)

    def _write(self, part: int) -> None:
        pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")
        first = part * self.part_rows
        expected = range(first, min(first + self.part_rows, self.total))
        if [row["id"] for row in self.rows] != list(expected):
            raise BatchError(f"expected ids {expected.start} to {expected.stop - 1} in part {part}, got others.")
        with replaced_file(self.path(part)) as temporary:
            pq.write_table(pa.Table.from_pylist(self.rows, schema=self.schema), temporary, compression="zstd")
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())  # a part that exists is complete, after a power failure too
        self.rows_done += len(self.rows)
        self.rows_written += len(self.rows)
        self.rows = []


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of the names, types, shapes and values of a model's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _start_or_continue(out: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The job of the folder: the given one, or an equal one of an earlier run with its part_rows."""
    file = out / JOB_FILE
    if not file.is_file():
        if parts := sorted(out.glob("part-*.parquet")):
            raise BatchError(f"expected {JOB_FILE} beside {parts[0]}, got none. Use another folder.")
        write_json(file, job | {"saccade": package_version()})
        return job
    earlier = json.loads(file.read_text())
    if changed := [key for key in job if key != "part_rows" and job[key] != earlier.get(key)]:
        raise BatchError(f"{out} holds another job: {', '.join(changed)} changed. Use another folder, or delete it.")
    return job | {"part_rows": earlier["part_rows"]}


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Exclude a second process from the folder; the lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchError(
                f"{out} is being written by another process. Wait for it, or use another folder."
            ) from error
        except OSError:
            pass  # a file system without locks
        yield


@contextmanager
def _progress_bar(show: bool, total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """A function of rows done and errors that moves a bar with speed and remaining time."""
    if not show:
        yield lambda done, errors: None
        return
    rich = require("rich.progress", "train")
    columns = (
        rich.TextColumn("predicting"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[speed]:.0f} images/s, {task.fields[errors]} errors"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns) as bar:
        task = bar.add_task("", total=total, completed=done, speed=0.0, errors=0)
        started, first = time.monotonic(), done

        def advance(done: int, errors: int) -> None:
            speed = (done - first) / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done, speed=speed, errors=errors)

        yield advance
