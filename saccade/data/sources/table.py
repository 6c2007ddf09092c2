"""Pictures in tables: Parquet in the convention of Hugging Face, and Hugging Face data sets saved to disk.

An image is a struct {bytes, path} holding the encoded file (plain binary, or a path, will do as well), a label an
integer or a string; the schema's metadata says which column is which. `pyarrow` alone reads all of it.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade.data.decode.image import BadImage, read_image
from saccade.data.sources.base import DataError

IN_MEMORY = 4 * 2**30  # Parquet files up to this size (compressed) are read into memory
IMAGE_NAMES, LABEL_NAMES = ("image", "img", "jpg", "picture"), ("label", "labels", "fine_label", "class", "target", "y")


class EncodedColumn:
    """A column of encoded pictures, masks or clips; opened on first use, in each process."""

    def __init__(self, files: Sequence[str | Path], column: str):
        self.files, self.column = [str(file) for file in files], column
        self._cells: Any = None
        self._starts = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        pq = require("pyarrow.parquet", "train")
        if all(file.endswith(".parquet") for file in self.files):
            return sum(pq.read_metadata(file).num_rows for file in self.files)
        return len(_read(self.files, self.column))

    def __getstate__(self) -> dict[str, Any]:
        """Loader processes that are spawned, not forked, open the files for themselves."""
        return self.__dict__ | {"_cells": None}

    def encoded(self, index: int) -> tuple[Any, str]:
        """What lies in row `index`: its bytes, or the path when only that is stored; and its name for people."""
        pa = require("pyarrow", "train")

        if self._cells is None:
            self._cells = _open_images(self.files, self.column)
            self._starts = np.cumsum([0] + [len(chunk) for chunk in self._cells.chunks])
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        cell = self._cells.chunk(chunk)[index - int(self._starts[chunk])]
        data, path = (cell["bytes"], cell["path"]) if pa.types.is_struct(cell.type) else (cell, None)
        if pa.types.is_string(data.type) or pa.types.is_large_string(data.type):
            data, path = None, data
        if data is not None and data.is_valid:
            return data.as_py(), self.name(index)
        if path is None or not path.is_valid:
            raise BadImage(self.name(index), "the row holds no picture")
        return Path(self.files[0]).parent / path.as_py(), self.name(index)

    def name(self, index: int) -> str:
        where = self.files[0] if len(self.files) == 1 else os.path.commonpath(self.files)
        return f"{where}, row {index}"


class TableSource:
    """Rows of Parquet or Arrow files."""

    def __init__(
        self,
        files: Sequence[str | Path],
        image_column: str | None = None,
        label_column: str | None = None,
        classes: list[str] | None = None,
    ):
        self.files = [str(file) for file in files]
        schema = _schema(self.files[0])
        features = _features(schema)
        self.image_column = _choose(schema, features, "image", image_column)
        self.label_column = _choose(schema, features, "label", label_column)
        labels = _read(self.files, self.label_column)
        self._images = EncodedColumn(self.files, self.image_column)
        self.classes, self.labels = _number(labels, features.get(self.label_column, {}), classes)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def name(self, index: int) -> str:
        return self._images.name(index)


def describe_columns(file: str) -> tuple[list[str], dict[str, str]]:
    """Names of a file's columns, and the notes in its schema beside Hugging Face's."""
    schema = _schema(file)
    return list(schema.names), {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}


def disk_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set written by `Dataset.save_to_disk`."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} was saved with an indices mapping; call flatten_indices() before save_to_disk().")
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _schema(file: str) -> Any:
    pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")

    try:
        if file.endswith(".parquet"):
            return pq.read_schema(file)
        with pa.memory_map(file) as mapped:
            return pa.ipc.open_stream(mapped).schema
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _features(schema: Any) -> dict[str, Any]:
    """Hugging Face's description of the columns, if the file carries one."""
    about = (schema.metadata or {}).get(b"huggingface")
    return json.loads(about).get("info", {}).get("features", {}) if about else {}


def _choose(schema: Any, features: dict[str, Any], role: str, wanted: str | None) -> str:
    """The column asked for, the one the metadata names, or one with a usual name."""
    if wanted is not None:
        if wanted not in schema.names:
            raise DataError(f"no column {wanted!r}; the file has {', '.join(schema.names)}.")
        return wanted
    kind = {"image": "Image", "label": "ClassLabel"}[role]
    described = [
        name for name, feature in features.items() if isinstance(feature, dict) and feature.get("_type") == kind
    ]
    usual = [name for name in (IMAGE_NAMES if role == "image" else LABEL_NAMES) if name in schema.names]
    found = [name for name in described if name in schema.names] or usual
    if not found:
        raise DataError(f"no {role} column among {', '.join(schema.names)}; name it: --set data.{role}_column=NAME.")
    return found[0]


def _read(files: list[str], column: str) -> Any:
    """One column of all files, as a chunked array."""
    pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")

    try:
        if files[0].endswith(".parquet"):
            tables = [pq.read_table(file, columns=[column]) for file in files]
        else:
            tables = [pa.ipc.open_stream(pa.memory_map(file)).read_all().select([column]) for file in files]
        return pa.concat_tables(tables).column(column)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"column {column!r} of {files[0]} and its companions cannot be read: {error}") from error


def _number(labels: Any, feature: dict[str, Any], classes: list[str] | None) -> tuple[list[str], np.ndarray]:
    """Class names and (N,) numbers; strings are numbered in sorted order, or by the other split's `classes`."""
    pa = require("pyarrow", "train")

    if labels.null_count:
        raise DataError(f"{labels.null_count} rows have no label.")
    if pa.types.is_integer(labels.type):
        numbers = labels.to_numpy().astype(np.int64)
        names = feature.get("names") or classes or [str(i) for i in range(int(numbers.max(initial=-1)) + 1)]
        return list(names), numbers
    if pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type):
        words = labels.to_pylist()
        names = classes or sorted(set(words))
        if unknown := sorted(set(words) - set(names)):
            raise DataError(f"labels the training set has not: {', '.join(unknown[:5])}.")
        numbers = {name: i for i, name in enumerate(names)}
        return list(names), np.asarray([numbers[word] for word in words], dtype=np.int64)
    raise DataError(f"a label must be an integer or a string, got a column of {labels.type}.")


def _open_images(files: list[str], column: str) -> Any:
    """The encoded pictures: in memory when small, else memory-mapped, so that loader processes share one copy."""
    if not files[0].endswith(".parquet"):
        return _read(files, column)  # Arrow files are memory-mapped already
    if sum(os.path.getsize(file) for file in files) <= IN_MEMORY:
        return _read(files, column)
    return _read([str(_unpacked(files, column))], column)


def _unpacked(files: list[str], column: str) -> Path:
    """Large Parquet is unpacked once into an Arrow file under the cache folder: rows are then a seek away."""
    pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")

    stamp = json.dumps([[os.path.abspath(f), os.path.getsize(f), os.path.getmtime(f)] for f in files] + [column])
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "saccade"
    target = root / f"{hashlib.sha256(stamp.encode()).hexdigest()[:24]}.arrow"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=root)
    os.close(handle)
    try:
        schema = pa.schema([pq.read_schema(files[0]).field(column)])
        with pa.ipc.new_stream(temporary, schema) as writer:
            for file in files:
                for batch in pq.ParquetFile(file).iter_batches(batch_size=256, columns=[column]):
                    writer.write_batch(batch)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target
