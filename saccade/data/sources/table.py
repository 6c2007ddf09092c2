"""Images in Parquet files (Hugging Face convention), and in Hugging Face datasets saved to disk.

An image is a struct {bytes, path} with the encoded file, plain bytes or a path; a label is an integer, a string
or a list of either (multi-label). The metadata of the schema says which column is which. Only pyarrow is needed.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade._files import replaced_file
from saccade.data.decode.image import BadImage, read_image
from saccade.data.sources.base import DataError, index_label_lists, index_labels, numbered_classes
from saccade.weights.download import home

MAX_IN_MEMORY = 4 * 2**30  # Parquet files of up to this total size (compressed) are read into memory
COLUMN_NAMES = {
    "image": ("image", "img", "jpg", "picture"),
    "label": ("label", "labels", "fine_label", "class", "target", "y"),
    "mask": ("annotation", "mask", "label", "labels", "segmentation", "segmentation_mask", "semantic"),
}
Value = TypeVar("Value", bytes, str)
FEATURE_TYPES = {"image": "Image", "label": "ClassLabel"}  # in Hugging Face's metadata


class EncodedColumn:
    """A column of encoded images or masks, opened at first use in each process."""

    def __init__(self, files: Sequence[str | Path], column: str):
        self.files, self.column = [str(file) for file in files], column
        self._cells: Any = None
        self._chunk_starts = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        pq = require("pyarrow.parquet", "train")
        if all(file.endswith(".parquet") for file in self.files):
            return sum(pq.read_metadata(file).num_rows for file in self.files)
        return len(read_column(self.files, self.column))

    def __getstate__(self) -> dict[str, Any]:
        """Without the Arrow buffers: spawned DataLoader workers open the files themselves."""
        return self.__dict__ | {"_cells": None}

    def encoded(self, index: int) -> tuple[Any, str]:
        """The bytes in row `index`, or the path if only that is stored, and the name of the row."""
        if self._cells is None:
            self._cells = _open_encoded(self.files, self.column)
            self._chunk_starts = np.cumsum([0] + [len(chunk) for chunk in self._cells.chunks])
        if index >= self._chunk_starts[-1]:
            raise BadImage(self.name(index), "the row has no image")
        chunk = int(np.searchsorted(self._chunk_starts, index, side="right")) - 1
        cell = self._cells.chunk(chunk)[index - int(self._chunk_starts[chunk])]
        return encoded_cell(cell, self.name(index), self.files[0]), self.name(index)

    def name(self, index: int) -> str:
        location = self.files[0] if len(self.files) == 1 else os.path.commonpath(self.files)
        return f"{location}, row {index}"


def encoded_cell(cell: Any, name: str, file: str) -> bytes | str:
    """The bytes of an Arrow cell {bytes, path}, bytes or path; or the path, relative to the folder of `file`."""
    pa = require("pyarrow", "train")
    data, path = cell, None
    if pa.types.is_struct(cell.type) and cell.is_valid:
        fields = [field.name for field in cell.type]
        data, path = (cell[key] if key in fields else None for key in ("bytes", "path"))
    if data is not None and (pa.types.is_string(data.type) or pa.types.is_large_string(data.type)):
        data, path = None, data
    if data is not None and data.is_valid:
        return _checked(data.as_py(), bytes, name)
    if path is None or not path.is_valid:
        raise BadImage(name, "the row has no image")
    try:
        relative = _checked(path.as_py(), str, name)
    except UnicodeDecodeError as error:
        raise BadImage(name, "the path is not UTF-8") from error
    return os.path.join(os.path.dirname(file) or ".", relative)  # never a URL from a cell


def _checked(value: Any, kind: type[Value], name: str) -> Value:
    if not isinstance(value, kind):
        raise BadImage(name, f"expected an image as bytes or its path as text, got {type(value).__name__}")
    return value


class TableSource:
    """Rows of Parquet or Arrow files with an image and a label."""

    def __init__(
        self,
        files: Sequence[str | Path],
        image_column: str | None = None,
        label_column: str | None = None,
        classes: list[str] | None = None,
    ):
        self.files = [str(file) for file in files]
        schema = read_schema(self.files[0])
        self.image_column = choose_column(schema, "image", image_column)
        self.label_column = choose_column(schema, "label", label_column)
        labels = read_column(self.files, self.label_column)
        feature = class_feature(read_features(schema).get(self.label_column))
        self._images = EncodedColumn(self.files, self.image_column)
        self.classes, self.labels = _index_label_column(labels, feature, classes, self.files[0])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        return read_image(*self._images.encoded(index))

    def name(self, index: int) -> str:
        return self._images.name(index)


def saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a dataset written by `Dataset.save_to_disk`."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} was saved with an indices mapping. Call flatten_indices() before save_to_disk().")
    return [folder / entry["filename"] for entry in state["_data_files"]]


def read_schema(file: str) -> Any:
    """The Arrow schema of a Parquet or Arrow stream file."""
    pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")

    try:
        if file.endswith(".parquet"):
            return pq.read_schema(file)
        with pa.memory_map(file) as mapped:
            return pa.ipc.open_stream(mapped).schema
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from error


def read_features(schema: Any) -> dict[str, Any]:
    """Hugging Face's description of the columns, {} if the file has none."""
    text = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(text).get("info", {}).get("features", {}) if text else {}
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"expected Hugging Face's metadata as JSON in the schema, got {error}.") from error
    return features if isinstance(features, dict) else {}


def class_feature(feature: Any) -> dict[str, Any]:
    """Hugging Face's description of a column, of the elements if it is a list; {} if there is none."""
    if isinstance(feature, list):  # how older files describe a list
        feature = feature[0] if feature else {}
    elif isinstance(feature, dict) and feature.get("_type") in ("Sequence", "List", "LargeList"):
        feature = feature.get("feature")
    return feature if isinstance(feature, dict) else {}


def choose_column(schema: Any, role: str, requested: str | None) -> str:
    """The requested column, else the one that Hugging Face's metadata names, else one with a common name."""
    if requested is not None:
        if requested not in schema.names:
            raise DataError(f"expected a column {requested!r}, got {', '.join(schema.names)}.")
        return requested
    common = [name for name in COLUMN_NAMES[role] if name in schema.names]
    described = [
        name
        for name, feature in read_features(schema).items()
        if class_feature(feature).get("_type") == FEATURE_TYPES.get(role, "") and name in schema.names
    ]
    candidates = [name for name in common if name in described] or described or common
    if not candidates:
        raise DataError(
            f"no {role} column among {', '.join(schema.names)}. Name it with --set data.{role}_column=NAME."
        )
    return candidates[0]


def read_column(files: Sequence[str], column: str) -> Any:
    """One column of all files, as a chunked array."""
    pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")

    try:
        if files[0].endswith(".parquet"):
            tables = [pq.read_table(file, columns=[column]) for file in files]
        else:
            tables = [pa.ipc.open_stream(pa.memory_map(file)).read_all().select([column]) for file in files]
        return pa.concat_tables(tables).column(column)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(f"cannot read column {column!r} of {files[0]} (and {len(files) - 1} more): {error}") from error


def _index_label_column(
    labels: Any, feature: dict[str, Any], classes: list[str] | None, file: str
) -> tuple[list[str], np.ndarray]:
    """Class names and indices (N,) of integer or string labels, or multi-hot labels (N, K) of lists of them."""
    pa = require("pyarrow", "train")
    is_list = any(getattr(pa.types, f"is_{kind}")(labels.type) for kind in ("list", "large_list", "fixed_size_list"))

    if labels.null_count:
        raise DataError(f"{labels.null_count} rows of {file} have no label.")
    if pa.types.is_integer(labels.type):
        indices = labels.to_numpy().astype(np.int64)
        names = feature.get("names") or classes or numbered_classes(indices, file)
        return list(names), indices
    if pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type):
        try:
            return index_labels(labels.to_pylist(), classes or None, file)
        except UnicodeDecodeError as error:
            raise DataError(f"expected labels in UTF-8 in {file}, got {error}.") from error
    if is_list and (pa.types.is_integer(labels.type.value_type) or pa.types.is_string(labels.type.value_type)):
        return index_label_lists(labels.to_pylist(), feature.get("names") or classes, file)
    raise DataError(f"expected labels of type integer, string or lists of them in {file}, got {labels.type}.")


def _open_encoded(files: list[str], column: str) -> Any:
    """Encoded images in memory if small, else memory-mapped, so that DataLoader workers share one copy."""
    is_arrow = not files[0].endswith(".parquet")  # Arrow files are memory-mapped by `read_column`
    if is_arrow or sum(os.path.getsize(file) for file in files) <= MAX_IN_MEMORY:
        return read_column(files, column)
    return read_column([str(_convert_to_arrow(files, column))], column)


def _convert_to_arrow(files: list[str], column: str) -> Path:
    """Convert large Parquet files once to an Arrow file in the cache folder, for random access to rows."""
    pa, pq = require("pyarrow", "train"), require("pyarrow.parquet", "train")

    key = json.dumps([[os.path.abspath(f), os.path.getsize(f), os.path.getmtime(f)] for f in files] + [column])
    target = home() / "arrow" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.arrow"
    if target.exists():
        return target
    schema = pa.schema([pq.read_schema(files[0]).field(column)])
    with replaced_file(target) as temporary, pa.ipc.new_stream(str(temporary), schema) as writer:
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=256, columns=[column]):
                writer.write_batch(batch)
    return target
