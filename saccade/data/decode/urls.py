"""Bytes of local files and of fsspec URLs (http, s3, gs, hf, ...)."""

import re
from typing import Any, BinaryIO, NamedTuple, cast

from saccade._extras import require

URL = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)


class Location(NamedTuple):
    """A range of bytes in a file, such as a member of a tar archive."""

    path: str
    offset: int
    size: int


def is_url(path: Any) -> bool:
    """Whether a path names an fsspec file system, as in s3://bucket/a.jpg."""
    return isinstance(path, str) and URL.match(path) is not None


def open_file(path: str) -> BinaryIO:
    """A local file or URL, open for reading with random access."""
    if not is_url(path):
        return open(path, "rb")
    return cast(BinaryIO, require("fsspec", "train").open(path, "rb").open())


def read_bytes(path: str | Location) -> bytes:
    """The content of a local file, a URL, or a range of one; raises OSError, whose message names what is wrong."""
    try:
        if isinstance(path, Location):
            with open_file(path.path) as file:
                file.seek(path.offset)
                return file.read(path.size)
        if is_url(path):
            filesystem, name = require("fsspec", "train").core.url_to_fs(path)
            return filesystem.cat_file(name)
        with open(path, "rb") as file:
            return file.read()
    except (ImportError, OSError):
        raise
    except Exception as error:  # file systems raise their own types: aiohttp.ClientError, botocore's ClientError, ...
        raise OSError(f"cannot read {path}: {' '.join(str(error).split()) or type(error).__name__}") from error
