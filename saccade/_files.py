"""Write files atomically: a reader sees the old file or the new one, never half of it."""

import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


def write_file(path: str | os.PathLike, content: bytes | str) -> Path:
    """Write a file and create its folder; names that are not valid UTF-8 are escaped in text."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replaced_file(path) as temporary:
        temporary.write_bytes(data)
    return Path(path)


def write_json(path: str | os.PathLike, document: Any) -> Path:
    """Write indented JSON."""
    return write_file(path, json.dumps(document, indent=2, default=str) + "\n")


def unique_stem(name: str, used: set[str]) -> str:
    """The stem of a file name, numbered from its second use: "cat", "cat-2"; adds it to `used`."""
    stem, count = Path(name).stem, 2
    while stem in used:
        stem, count = f"{Path(name).stem}-{count}", count + 1
    used.add(stem)
    return stem


def png_bytes(image: "Image.Image") -> bytes:
    """A Pillow image as the content of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@contextmanager
def replaced_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it, or is deleted after an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: str | os.PathLike) -> Iterator[None]:
    """Wait until no other process has this lock; it ends with the process, however that ends. Nothing on Windows."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _umask() -> int:
    """The process's mask of file permissions, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
