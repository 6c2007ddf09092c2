"""Unlabelled images at a path, one after the other, for batch prediction.

The order is the same in every run, and the position in it is the id of an image. Names are listed lazily and images are
read where they are decoded, so memory stays bounded for any number of them.
"""

import glob
import hashlib
import os
import tarfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from saccade._extras import printable, require
from saccade.data.decode.image import IMAGE_SUFFIXES, BadImage
from saccade.data.decode.inputs import Input
from saccade.data.decode.urls import Location, is_url, open_file
from saccade.data.open.splits import files_matching
from saccade.data.sources.base import DataError
from saccade.data.sources.folder import is_data_file
from saccade.data.sources.table import choose_column, encoded_cell

ROWS_PER_READ = 64  # of a Parquet file


class Entry(NamedTuple):
    """Where an image is, without its bytes: a file, a row of a Parquet file, a member of a tar shard, or an error."""

    id: int  # position in the source
    name: str  # for messages and results
    path: str
    row: int | None = None
    offset: int | None = None
    size: int | None = None
    error: str | None = None  # why the file cannot be opened


class _Group(NamedTuple):
    """Images of one file, or one image."""

    name: str
    count: int
    read: Callable[[int, Container[int]], Iterator[Input]]  # first id, ids to skip
    entries: Callable[[int], Iterator[Entry]]  # first id


class Inputs:
    """Images of a folder, glob, file, Parquet file, tar shard or URL, or of a list of these.

    Sub-folders are included. Of Parquet, every row counts, of tar shards, every member with the suffix of an image.
    A file that cannot be read is an error of its images when they are decoded, not of the source.
    """

    def __init__(self, source: str | os.PathLike | Sequence[str | os.PathLike], image_column: str | None = None):
        is_one = isinstance(source, (str, os.PathLike))
        self.sources = [os.fspath(entry) for entry in ([source] if is_one else source)]  # type: ignore[union-attr]
        self.image_column = image_column
        for entry in self.sources:
            if not is_url(entry) and not glob.has_magic(entry) and not os.path.exists(entry):
                raise DataError(
                    f"no images at {entry}: expected a folder, a glob, files, Parquet, tar shards or a URL."
                )

    def __iter__(self) -> Iterator[Input]:
        return self.items()

    def items(self, skip: Container[int] = frozenset()) -> Iterator[Input]:
        """Images in order, without the ids in `skip`, which are not read."""
        first = 0
        for group in self._groups():
            yield from group.read(first, skip)
            first += group.count

    def entries(self) -> Iterator[Entry]:
        """Where the images are, in order; `read_entries` opens them, in this process or another."""
        first = 0
        for group in self._groups():
            yield from group.entries(first)
            first += group.count

    def summary(self) -> tuple[int, str]:
        """Number of images, and a digest of their names that tells whether two sources are equal."""
        digest, count = hashlib.sha256(), 0
        for group in self._groups():
            digest.update(f"{group.name}\0{group.count}\n".encode())
            count += group.count
        return count, digest.hexdigest()

    def _groups(self) -> Iterator[_Group]:
        for source in self.sources:
            for path in _list_files(source):
                suffix = os.path.splitext(path)[1].lower()
                if suffix == ".parquet":
                    yield _parquet_group(path, self.image_column)
                elif suffix == ".tar":
                    yield _tar_group(path)
                else:
                    yield _one_image(Entry(0, printable(path), path))


def read_entries(entries: Iterable[Entry], image_column: str | None = None) -> Iterator[Input]:
    """Images of entries, in order; consecutive rows of one Parquet file are read together."""
    for (path, is_row), group in groupby(entries, lambda entry: (entry.path, entry.row is not None)):
        if not is_row:
            yield from map(_entry_input, group)
            continue
        by_row = {cast(int, entry.row): entry for entry in group}
        if list(by_row) != sorted(by_row):
            raise ValueError(f"expected rows of {path} in ascending order.")
        for row, cell in _parquet_cells(path, image_column, by_row.__contains__):
            yield _parquet_input(by_row[row].id, by_row[row].name, cell, path)


def _entry_input(entry: Entry) -> Input:
    content: str | Location | BadImage = entry.path
    if entry.error is not None:
        content = BadImage(entry.path, entry.error)
    elif entry.offset is not None:
        content = Location(entry.path, entry.offset, cast(int, entry.size))
    return Input(entry.id, entry.name, content)


def _list_files(source: str) -> Iterator[str]:
    """Files at a path, sorted folder by folder. Explicit files and globs are not filtered by suffix."""
    if is_url(source):
        yield from _list_url(source)
    elif os.path.isdir(source):
        yield from files_matching(Path(source), "*.parquet", "*.tar") or _walk(source)
    elif os.path.exists(source):
        yield source
    else:
        yield from (path for path in sorted(glob.glob(source, recursive=True)) if os.path.isfile(path))


def _walk(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir() and entry.name[0] != ".":
            yield from _walk(entry.path)
        elif is_data_file(entry.name, IMAGE_SUFFIXES):
            yield entry.path


def _list_url(url: str) -> Iterable[str]:
    if Path(url).suffix.lower() in IMAGE_SUFFIXES | {".parquet", ".tar"} and not glob.has_magic(url):
        return [url]
    filesystem, path = require("fsspec", "train").core.url_to_fs(url)
    try:
        paths = filesystem.glob(path) if glob.has_magic(path) else filesystem.find(path)
    except Exception as error:  # file systems raise their own types
        raise DataError(f"cannot list {url}: {error}.") from error
    chosen = [path for path in sorted(paths) if Path(path).suffix.lower() in IMAGE_SUFFIXES | {".parquet", ".tar"}]
    return [filesystem.unstrip_protocol(path) for path in chosen]


def _one_image(entry: Entry) -> _Group:
    """A file with one image, or one image that cannot be read in place of a file that cannot be opened."""

    def entries(first: int) -> Iterator[Entry]:
        yield entry._replace(id=first)

    def read(first: int, skip: Container[int]) -> Iterator[Input]:
        if first not in skip:
            yield _entry_input(entry._replace(id=first))

    return _Group(entry.name, 1, read, entries)


def _parquet_group(path: str, image_column: str | None) -> _Group:
    """Rows of a Parquet file."""
    pq = require("pyarrow.parquet", "train")
    try:
        with open_file(path) as file:
            parquet = pq.ParquetFile(file)
            count = parquet.metadata.num_rows
            choose_column(parquet.schema_arrow, "image", image_column)
    except DataError:
        raise
    except Exception as error:  # pyarrow and file systems raise many types; a damaged file is one bad image
        return _bad_group(path, f"cannot read Parquet: {error}")

    def name(row: int) -> str:
        return f"{printable(path)}, row {row}"

    def read(first: int, skip: Container[int]) -> Iterator[Input]:
        for row, cell in _parquet_cells(path, image_column, lambda row: first + row not in skip):
            yield _parquet_input(first + row, name(row), cell, path)

    def entries(first: int) -> Iterator[Entry]:
        return (Entry(first + row, name(row), path, row=row) for row in range(count))

    return _Group(printable(path), count, read, entries)


def _parquet_cells(
    path: str, image_column: str | None, is_wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Any | BadImage]]:
    """Row and cell of the wanted rows, in parts of ROWS_PER_READ; row groups without wanted rows are not read.

    A row group that is damaged is an error of its rows.
    """
    pq = require("pyarrow.parquet", "train")
    with open_file(path) as file:
        parquet = pq.ParquetFile(file)
        column = choose_column(parquet.schema_arrow, "image", image_column)
        start = 0
        for number in range(parquet.num_row_groups):
            rows = range(start, start + parquet.metadata.row_group(number).num_rows)
            position = start
            start = rows.stop
            if not any(map(is_wanted, rows)):
                continue
            try:
                for batch in parquet.iter_batches(ROWS_PER_READ, row_groups=[number], columns=[column]):
                    for cell in batch.column(0):
                        if is_wanted(position):
                            yield position, cell
                        position += 1
            except OSError as error:  # of pyarrow: a damaged page
                reason = " ".join(str(error).split())
                yield from (
                    (row, BadImage(f"{printable(path)}, row {row}", f"cannot read Parquet: {reason}"))
                    for row in range(position, rows.stop)
                    if is_wanted(row)
                )


def _parquet_input(number: int, name: str, cell: Any | BadImage, file: str) -> Input:
    try:
        content = cell if isinstance(cell, BadImage) else encoded_cell(cell, name, file)
    except BadImage as error:
        content = error
    return Input(number, name, content)


def _tar_group(path: str) -> _Group:
    """Members of an uncompressed tar file: located by their headers if it is local, else read one after the other."""

    def members() -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        with open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and is_data_file(os.path.basename(member.name) or ".", IMAGE_SUFFIXES):
                    yield tar, member
                tar.members = []  # type: ignore[attr-defined] # tarfile would collect every header

    def name(member: tarfile.TarInfo) -> str:
        return f"{printable(path)}, {printable(member.name)}"

    def read(first: int, skip: Container[int]) -> Iterator[Input]:
        for number, (tar, member) in enumerate(members(), first):
            if number in skip:
                continue
            content: bytes | Location = Location(path, member.offset_data, member.size)
            if is_url(path):
                content = cast(BinaryIO, tar.extractfile(member)).read()
            yield Input(number, name(member), content)

    def entries(first: int) -> Iterator[Entry]:
        for number, (_, member) in enumerate(members(), first):
            yield Entry(number, name(member), path, offset=member.offset_data, size=member.size)

    try:
        return _Group(printable(path), sum(1 for _ in members()), read, entries)
    except (tarfile.TarError, OSError, ValueError) as error:
        return _bad_group(path, f"expected an uncompressed .tar file: {error}")


def _bad_group(path: str, reason: str) -> _Group:
    """One image that cannot be read, in place of a file that cannot be opened."""
    return _one_image(Entry(0, printable(path), path, error=" ".join(reason.split())))
