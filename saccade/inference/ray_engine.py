"""Batch prediction on Ray Data: the rows of the local engine, past one machine.

    manifest (Parquet: id, path, ...) -> Ray's checkpoint filter -> decode (CPU tasks) -> predict (actors) -> write

Ray Data's checkpoint gives exactly-once output: the ids of a file are written first as pending, then the file, then the
ids are renamed to committed; the next run deletes files of pending ids and skips committed ones. It filters sources
that are read from files only, hence the manifest; and it does a dropped row again, hence errors are rows.

A decoding task returns one row per batch, with all of its images: images of ids k * batch_size to
(k + 1) * batch_size - 1 are predicted together as in the local engine, so that rounding is the same.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade._extras import require
from saccade.data.decode.inputs import Input
from saccade.data.open.inputs import Entry, Inputs, read_entries
from saccade.inference.batch import Job
from saccade.inference.rows import RowPredictor, columns_of, make_reader
from saccade.models.card import Card
from saccade.tasks.load import card_of
from saccade.tasks.predict import PredictOptions, Sample
from saccade.tasks.results import Unreadable

MANIFEST, CHECKPOINT, ROWS = "_manifest", "_checkpoint", "rows"
BLOCK_BYTES = 8 << 20  # a batch or a few: what a block holds is lost when a run is killed
CPUS_PER_ACTOR = 2  # without GPUs; other than that of decoding, or Ray Data would decode inside of the actors
MIN_CPUS = 4  # of a Ray started here: the model, the checkpoint filter and decoding must run at the same time


def run_ray(job: Job, actors: int | None = None) -> tuple[int, int, int]:
    """Rows in the folder, rows with an error, rows of this run."""
    before = count_committed(job.out)
    if before < job.total:
        write_manifest(job.inputs, job.out / MANIFEST, job.part_rows)
        _execute(job, actors)
    rows, errors = count_rows(job.out)
    return rows, errors, rows - before


def _execute(job: Job, actors: int | None) -> None:
    ray, data = require("ray", "scale"), require("ray.data", "scale")
    checkpoint = require("ray.data.checkpoint", "scale")
    started_here = not ray.is_initialized()
    if started_here:
        own = {"num_cpus": max(MIN_CPUS, os.cpu_count() or 1), "include_dashboard": False}
        try:
            ray.init(log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else own))
        except Exception as error:  # Ray raises many types, among them Exception itself
            reason = " ".join(str(error).split())
            raise RuntimeError(
                f"Ray did not start: {reason} Check RAY_ADDRESS and the load of this machine."
            ) from error
    try:
        context = data.DataContext.get_current()
        before = context.checkpoint_config, context.enable_progress_bars, context.target_max_block_size
        context.checkpoint_config = checkpoint.CheckpointConfig(
            id_column="id",
            checkpoint_path=str((job.out / CHECKPOINT).absolute()),
            delete_checkpoint_on_success=False,  # a second run after success must find it
        )
        context.enable_progress_bars = job.progress
        context.target_max_block_size = BLOCK_BYTES
        try:
            _run_pipeline(job, actors)
        finally:
            context.checkpoint_config, context.enable_progress_bars, context.target_max_block_size = before
    finally:
        if started_here:
            ray.shutdown()


def _run_pipeline(job: Job, actors: int | None) -> None:
    ray, data = require("ray", "scale"), require("ray.data", "scale")
    resources, card = ray.cluster_resources(), card_of(job.model)
    gpus = int(resources.get("GPU", 0))
    on_gpu = str(job.device or ("cuda" if gpus else "cpu")).startswith("cuda")
    if on_gpu and not gpus:
        raise ValueError(f"expected a GPU in the Ray cluster for device {job.device}, got none. Use device cpu.")
    count = actors or (gpus if on_gpu else max(1, int(0.75 * resources.get("CPU", 1)) // CPUS_PER_ACTOR))
    arguments = (job.task, job.options, "cuda" if on_gpu else "cpu", job.dtype, job.tokens)
    model = ray.put(job.model.cpu())
    rows = data.read_parquet(str((job.out / MANIFEST).absolute()))
    rows = rows.repartition(target_num_rows_per_block=job.part_rows)  # Ray Data reads small files as one block
    rows = rows.map_batches(
        _decode_batches,
        batch_size=None,  # a block
        batch_format="pyarrow",
        fn_args=(card, job.options, job.batch_size, job.inputs.image_column),
        num_cpus=1,
    )
    rows = rows.map_batches(
        _PredictRows,
        batch_size=1,  # one row has the images of a batch
        batch_format="pyarrow",
        fn_constructor_args=(model, *arguments),
        compute=data.ActorPoolStrategy(size=count),
        num_gpus=1 if on_gpu else 0,
        num_cpus=0 if on_gpu else CPUS_PER_ACTOR,
    )
    rows.write_parquet(
        str((job.out / ROWS).absolute()),
        mode=data.SaveMode.APPEND,
        min_rows_per_file=job.part_rows,
        schema=columns_of(job.task, card, job.tokens)[0],
        compression="zstd",
    )


# The manifest.


def manifest_schema() -> Any:
    pa = require("pyarrow", "scale")
    places = [(name, pa.int64()) for name in ("row", "offset", "size")]
    return pa.schema(
        [
            pa.field("id", pa.int64(), False),
            pa.field("name", pa.string(), False),
            pa.field("path", pa.binary(), False),  # of a file system: not always UTF-8
            *(pa.field(*field) for field in places),
            pa.field("error", pa.string()),
        ]
    )


def write_manifest(inputs: Inputs, folder: Path, part_rows: int) -> None:
    """One Parquet file per `part_rows` images with id and place of each; nothing if the folder exists."""
    if folder.is_dir():
        return
    pa, pq = require("pyarrow", "scale"), require("pyarrow.parquet", "scale")
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
    temporary.mkdir(parents=True)
    for part, entries in groupby(inputs.entries(), lambda entry: entry.id // part_rows):
        rows = [entry._asdict() | {"path": os.fsencode(entry.path)} for entry in entries]
        table = pa.Table.from_pylist(rows, schema=manifest_schema())
        pq.write_table(table, temporary / f"part-{part:08d}.parquet", compression="zstd")
    temporary.rename(folder)


def count_committed(out: Path) -> int:
    """Rows that Ray Data's checkpoint lists as written."""
    pq = require("pyarrow.parquet", "scale")
    files = [file for file in (out / CHECKPOINT).glob("*.parquet") if not file.name.endswith(".pending.parquet")]
    return sum(pq.read_metadata(file).num_rows for file in files)


def count_rows(out: Path) -> tuple[int, int]:
    """Rows in the written files, and those with an error."""
    pq = require("pyarrow.parquet", "scale")
    rows = errors = 0
    for file in sorted((out / ROWS).glob("*.parquet")):
        column = pq.read_table(file, columns=["error"]).column("error")
        rows += len(column)
        errors += len(column) - column.null_count
    return rows, errors


# Decoding, in CPU tasks after the checkpoint filter.


def batch_schema() -> Any:
    """One row per batch, with lists over its images; an image without pixels has an error."""
    pa = require("pyarrow", "scale")
    fields = {
        "ids": pa.list_(pa.int64()),
        "names": pa.list_(pa.string()),
        "errors": pa.list_(pa.string()),
        "pixels": pa.list_(pa.large_binary()),
        "shapes": pa.list_(pa.list_(pa.int32())),
        "sizes": pa.list_(pa.list_(pa.int32(), 2)),
    }
    return pa.schema(list(fields.items()))


def _decode_batches(
    table: Any, card: Card, options: PredictOptions, batch_size: int, image_column: str | None
) -> Iterator[Any]:
    """Rows of the manifest -> one row per batch."""
    pa = require("pyarrow", "scale")
    torch.set_num_threads(1)
    reader = make_reader(card, options)
    rows = sorted(table.to_pylist(), key=lambda row: row["id"])
    entries = (Entry(**row | {"path": os.fsdecode(row["path"])}) for row in rows)
    inputs = read_entries(entries, image_column)
    for _, group in groupby(inputs, lambda item: item.id // batch_size):
        samples = [(item, reader.read(item)) for item in group]
        yield pa.Table.from_pylist([pack_batch(samples)], schema=batch_schema())


def pack_batch(samples: Iterable[tuple[Input, Sample | Unreadable]]) -> dict[str, list[Any]]:
    """Samples as lists of numbers and bytes."""
    rows = []
    for item, sample in samples:
        pixels = sample.pixels.contiguous().numpy() if isinstance(sample, Sample) else None
        rows.append(
            {
                "ids": item.id,
                "names": item.name,
                "errors": sample.error if isinstance(sample, Unreadable) else None,
                "pixels": None if pixels is None else pixels.tobytes(),
                "shapes": None if pixels is None else list(pixels.shape),
                "sizes": list(sample.size) if isinstance(sample, Sample) else None,
            }
        )
    return {key: [row[key] for row in rows] for key in rows[0]}


def unpack_batch(row: dict[str, list[Any]]) -> list[Sample | Unreadable]:
    """The inverse of `pack_batch`, without the encoded images."""
    samples: list[Sample | Unreadable] = []
    for number, name, error, pixels, shape, size in zip(*row.values(), strict=True):
        item = Input(number, name, "")
        if error is not None:
            samples.append(Unreadable(name, item, error))  # type: ignore[arg-type] # declared for users' inputs
            continue
        array = np.frombuffer(pixels, np.uint8).reshape(shape).copy()
        samples.append(Sample(name, item, torch.from_numpy(array), tuple(size)))
    return samples


# Prediction, in actors that hold a copy of the model.


class _PredictRows:
    """Batches of images -> rows of the result. The arguments are those of `RowPredictor`, the model in Ray's store."""

    def __init__(self, model: Any, *arguments: Any):
        self.predictor = RowPredictor(require("ray", "scale").get(model), *arguments)

    def __call__(self, table: Any) -> Any:
        pa = require("pyarrow", "scale")
        rows = [row for batch in table.to_pylist() for row in self.predict(unpack_batch(batch))]
        return pa.Table.from_pylist(rows, schema=self.predictor.schema)

    def predict(self, samples: Sequence[Sample | Unreadable]) -> list[dict[str, Any]]:
        readable = [sample for sample in samples if isinstance(sample, Sample)]
        results = iter(self.predictor(readable) if readable else ())
        return [self.predictor.table_row(next(results) if isinstance(sample, Sample) else sample) for sample in samples]
