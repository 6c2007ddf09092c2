"""WebDataset tar shards: `key.jpg` with `key.cls`, or with `key.json` that has a label.

Shards are indexed once, from their headers. Afterwards every image is one seek away, so shards shuffle like files.
"""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.data.decode.image import IMAGE_SUFFIXES, read_image
from saccade.data.sources.base import DataError, numbered_classes, read_class_names

MAX_LABEL = 1_000_000  # bytes of a .cls or .json member, and of a long name in a header


class ShardSource:
    """Samples of uncompressed tar files. Class names come from `classes`, or classes.txt in the shards' folder."""

    def __init__(self, files: Sequence[str | Path], classes: list[str] | None = None):
        self.files = [str(file) for file in files]
        self.entries: list[tuple[int, int, int, str]] = []  # shard, offset, size, key
        labels: list[int] = []
        for shard, file in enumerate(self.files):
            for key, offset, size, label in _index_shard(file):
                self.entries.append((shard, offset, size, key))
                labels.append(label)
        if beyond := [label for label in labels if not -(2**63) <= label < 2**63]:
            raise DataError(f"expected labels of at most 64 bits in {self.files[0]}, got {beyond[0]}.")
        self.labels = np.asarray(labels, dtype=np.int64)
        names = classes or read_class_names(Path(self.files[0]).parent)
        self.classes = names or numbered_classes(self.labels, self.files[0])

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> Image.Image:
        shard, offset, size, _ = self.entries[index]
        with open(self.files[shard], "rb") as file:
            file.seek(offset)
            return read_image(file.read(size), self.name(index))

    def name(self, index: int) -> str:
        shard, _, _, key = self.entries[index]
        return f"{self.files[shard]}, {key}"


class _ShardFile(io.BufferedReader):
    """A file of which tarfile reads names and labels only; it would allocate whatever a damaged header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > 2 * MAX_LABEL:
            raise tarfile.ReadError(f"expected a name of at most {MAX_LABEL} bytes, got {size}")
        return super().read(size)


def _index_shard(file: str) -> list[tuple[str, int, int, int]]:
    """(key, offset, size, label) of every sample of a shard, in order."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with _ShardFile(io.FileIO(file)) as opened, tarfile.open(file, "r:", opened) as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")  # in WebDataset the key ends at the first dot
                key = f"{folder}/{stem}" if folder else stem
                if not member.isfile():
                    continue
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    images[key] = (member.offset_data, member.size)
                elif suffix in ("cls", "json") and (stream := tar.extractfile(member)) is not None:
                    if member.size > MAX_LABEL:
                        raise DataError(f"{file}, {member.name}: expected a label, got {member.size} bytes.")
                    labels[key] = _parse_label(stream.read(), suffix, f"{file}, {member.name}")
    except DataError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:  # the last three for damaged headers
        raise DataError(f"expected an uncompressed .tar file, got {file}: {error}.") from error
    if missing := [key for key in images if key not in labels]:
        raise DataError(f"{len(missing)} images of {file} have no label: expected {missing[0]}.cls.")
    return [(key, *location, labels[key]) for key, location in images.items()]


def _parse_label(data: bytes, suffix: str, name: str) -> int:
    try:
        if suffix == "cls":
            return int(data.decode().strip())
        metadata = json.loads(data)
        return int(metadata["label"] if "label" in metadata else metadata["cls"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{name}: expected an integer label (in JSON under `label` or `cls`).") from error
