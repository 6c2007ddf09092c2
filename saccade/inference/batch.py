"""Predict any number of images into Parquet files, in bounded memory; a run that was killed continues.

The images of a source (`data.open.inputs`) have ids from 0. The local engine writes part k with the rows of ids
k * part_rows to (k + 1) * part_rows - 1, in order and atomically: a part that exists is complete. The Ray engine
(`inference.ray_engine`) writes the same rows in another order, and Ray Data's checkpoint says which are written. Rows
therefore depend on model, options and source alone, not on workers, interruptions or speed.
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

from saccade._errors import UsageError
from saccade._extras import package_version, require
from saccade._files import replaced_file, write_json
from saccade.data.open.inputs import Inputs
from saccade.inference.rows import (
    BATCH_SIZES,
    Row,
    RowPredictor,
    check_tokens,
    choose_task,
)
from saccade.tasks.load import card_of, load
from saccade.tasks.predict import PredictOptions, predict_stream
from saccade.tasks.results import Unreadable

ENGINES = ("local", "ray")
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


class Job(NamedTuple):
    """What an engine needs: model, images, folder, and how."""

    model: nn.Module
    task: str
    options: PredictOptions
    inputs: Inputs
    total: int
    out: Path
    batch_size: int
    part_rows: int
    tokens: bool
    device: str | torch.device | None
    dtype: torch.dtype | None
    progress: bool

    def predictor(self) -> RowPredictor:
        return RowPredictor(self.model, self.task, self.options, self.device, self.dtype, self.tokens)


def predict_batch(
    model: nn.Module | str | os.PathLike,
    source: str | os.PathLike | Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    task: str | None = None,
    engine: str = "local",
    batch_size: int | None = None,
    workers: int | None = None,
    actors: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokens: bool = False,
    image_column: str | None = None,
    part_rows: int = PART_ROWS,
    progress: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> BatchSummary:
    """Predict all images of a source and write Parquet files into `out`, except for rows that an earlier run wrote.

    Columns: id, name, error (null for a prediction), and those of `inference.rows.columns_of` for the task.

    Args:
        model: a model, or what `saccade.load` takes.
        source: folders, globs, files, Parquet, tar shards and URLs, as in `Inputs`.
        task: "classify", "embed", "segment" or "detect"; default: the model's own.
        engine: "local": this process; "ray": Ray Data, on the cluster of RAY_ADDRESS or a new one on this machine.
        batch_size: images per forward pass.
        workers: threads that decode (local engine); default: the number of cores.
        actors: copies of the model (Ray engine); default: one per GPU, or per two cores.
        device: default: where the model is; with Ray, a GPU per actor if the cluster has one.
        dtype: of autocast; None computes in the model's own dtype.
        tokens: add columns with centre, area and norm of the tokens (`inference.rows.summarize_tokens`).
        part_rows: rows per file (with Ray: at least, and rows per decoding task); that of an earlier run has priority.
        progress: show a bar with speed and remaining time.
        on_progress: called with the number of rows done and their total (local engine).
        options: of `PredictOptions`.
    """
    if engine not in ENGINES:
        raise UsageError(f"expected engine {' or '.join(ENGINES)}, got {engine}.")
    for name, value, owner in (
        ("workers", workers, "local"),
        ("on_progress", on_progress, "local"),
        ("actors", actors, "ray"),
    ):
        if value is not None and engine != owner:
            raise UsageError(f"{name} applies to engine {owner}, not to {engine}. Remove it.")
    for name, value in (("batch_size", batch_size), ("workers", workers), ("actors", actors), ("part_rows", part_rows)):
        if value is not None and value < 1:
            raise UsageError(f"expected {name} of at least 1, got {value}.")
    if engine == "ray":
        require("ray", "scale")
    module = model if isinstance(model, nn.Module) else load(model)
    card, selected = card_of(module), PredictOptions(**options)
    task = choose_task(task, card)
    if tokens:
        check_tokens(task, selected)
    inputs, out = Inputs(source, image_column), Path(out)
    total, digest = inputs.summary()
    if not total:
        raise ValueError(f"expected images at {source}, got none.")
    fingerprint = {
        "model": card.name,
        "weights": weights_hash(module),
        "task": task,
        "engine": engine,
        "options": selected._asdict() | {"dtype": str(dtype), "tokens": tokens},
        "source": {"images": total, "digest": digest},
        "part_rows": part_rows,
    }
    size = batch_size or BATCH_SIZES[task]
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        fingerprint = _start_or_continue(out, json.loads(json.dumps(fingerprint)))
        job = Job(
            module, task, selected, inputs, total, out, size, fingerprint["part_rows"], tokens, device, dtype, progress
        )
        started = time.monotonic()
        if engine == "ray":
            from saccade.inference.ray_engine import run_ray

            rows, errors, predicted = run_ray(job, actors)
        else:
            rows, errors, predicted = _run_local(job, workers or os.cpu_count() or 1, on_progress)
        summary = BatchSummary(rows, errors, predicted, time.monotonic() - started)
        if summary.rows != total:
            raise BatchError(f"expected {total} rows in {out}, got {summary.rows}. The source changed during the run.")
        write_json(out / SUMMARY_FILE, summary._asdict())
    return summary


def _run_local(job: Job, threads: int, on_progress: Callable[[int, int], None] | None) -> tuple[int, int, int]:
    """Rows in the folder, rows with an error, rows of this run."""
    predictor = job.predictor()
    writer = _PartWriter(job.out, job.part_rows, job.total, predictor)
    done = writer.rows_done
    with _progress_bar(job.progress, job.total, done) as advance:
        items = job.inputs.items(skip=writer)
        stream: Iterator[Any] = predict_stream(predictor, items, job.batch_size, threads)  # type: ignore[arg-type]
        for result in stream:
            writer.add(result)
            done += 1
            advance(done, writer.errors)
            if on_progress:
                on_progress(done, job.total)
    return writer.rows_done, writer.errors, writer.rows_written


class _PartWriter:
    """Collects rows and writes a part when all of its ids are there. `id in writer` tells whether a row is written."""

    def __init__(self, out: Path, part_rows: int, total: int, predictor: RowPredictor):
        self.out, self.part_rows, self.total, self.predictor = out, part_rows, total, predictor
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

    def add(self, result: Row | Unreadable) -> None:
        """Add the row of an image; ids ascend."""
        self.rows.append(self.predictor.table_row(result))
        self.errors += result.error is not None
        number = self.rows[-1]["id"]
        if (number + 1) % self.part_rows == 0 or number + 1 == self.total:
            self._write(number // self.part_rows)

    def _write(self, part: int) -> None:
        pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")
        first = part * self.part_rows
        expected = range(first, min(first + self.part_rows, self.total))
        if [row["id"] for row in self.rows] != list(expected):
            raise BatchError(f"expected ids {expected.start} to {expected.stop - 1} in part {part}, got others.")
        with replaced_file(self.path(part)) as temporary:
            pq.write_table(pa.Table.from_pylist(self.rows, schema=self.predictor.schema), temporary, compression="zstd")
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
    console = require("rich.console", "train").Console(stderr=True)
    with rich.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=done, speed=0.0, errors=0)
        started, first = time.monotonic(), done

        def advance(done: int, errors: int) -> None:
            speed = (done - first) / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done, speed=speed, errors=errors)

        yield advance
