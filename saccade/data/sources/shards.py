"""Pictures in WebDataset tar shards: `key.jpg` beside `key.cls` (or `key.json` with a label).

Shards are indexed once, header by header; a picture is then one seek away, so they shuffle like any other source.
"""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError


class ShardSource:
    """Samples of uncompressed tar files."""

    def __init__(self, files: Sequence[str | Path], classes: list[str] | None = None):
        self.files = [str(file) for file in files]
        self.places: list[tuple[int, int, int, str]] = []  # shard, offset, size, key
        labels: list[int] = []
        for shard, file in enumerate(self.files):
            for key, offset, size, label in _index(file):
                self.places.append((shard, offset, size, key))
                labels.append(label)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.classes = classes or _class_names(Path(self.files[0]).parent, int(self.labels.max(initial=-1)) + 1)

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> Image.Image:
        shard, offset, size, _ = self.places[index]
        with open(self.files[shard], "rb") as file:
            file.seek(offset)
            return read_image(file.read(size), self.name(index))

    def name(self, index: int) -> str:
        shard, _, _, key = self.places[index]
        return f"{self.files[shard]}, {key}"


def _index(file: str) -> list[tuple[str, int, int, int]]:
    """(key, offset, size, label) of every sample of one shard, in order."""
    pictures: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")  # WebDataset: the key ends at the first dot
                key = f"{folder}/{stem}" if folder else stem
                if not member.isfile():
                    continue
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    pictures[key] = (member.offset_data, member.size)
                elif suffix in ("cls", "json"):
                    labels[key] = _label(tar.extractfile(member).read(), suffix, f"{file}, {member.name}")  # type: ignore[union-attr]
    except tarfile.TarError as error:
        raise DataError(f"{file} cannot be read: {error}. Shards must be plain .tar files.") from error
    if missing := [key for key in pictures if key not in labels]:
        raise DataError(f"{len(missing)} pictures of {file} have no label: expected {missing[0]}.cls beside them.")
    return [(key, *place, labels[key]) for key, place in pictures.items()]


def _label(data: bytes, suffix: str, name: str) -> int:
    try:
        if suffix == "cls":
            return int(data.decode().strip())
        about = json.loads(data)
        return int(about["label"] if "label" in about else about["cls"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name} holds no label: expected an integer (in JSON under `label` or `cls`).") from error


def _class_names(folder: Path, count: int) -> list[str]:
    """`classes.txt` or `classnames.txt` beside the shards, one name a line; else the numbers themselves."""
    for name in ("classes.txt", "classnames.txt"):
        if (folder / name).is_file():
            return [line.strip() for line in (folder / name).read_text().splitlines() if line.strip()]
    return [str(i) for i in range(count)]
