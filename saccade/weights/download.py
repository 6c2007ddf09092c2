"""Download files into a cache: resumed, verified, written atomically.

Environment variables: SACCADE_HOME is the folder of the cache, SACCADE_MIRROR replaces "https://github.com",
HTTPS_PROXY and HTTP_PROXY name proxies, SACCADE_OFFLINE=1 or HF_HUB_OFFLINE=1 forbids downloads.
"""

import hashlib
import json
import os
import sys
from contextlib import AbstractContextManager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub.utils import WeakFileLock, tqdm

from saccade._files import write_file

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without a byte


class DownloadError(RuntimeError):
    """A file could not be downloaded; the message says why and what to do."""


def home() -> Path:
    """The folder of the cache: SACCADE_HOME, or "saccade" in the cache folder of the platform."""
    if folder := os.environ.get("SACCADE_HOME"):
        return Path(folder).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~")).expanduser() / "saccade"
    if sys.platform == "darwin":
        return Path("~/Library/Caches/saccade").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "saccade"


def is_offline() -> bool:
    return any(
        os.environ.get(name, "0").lower() in ("1", "true", "yes") for name in ("SACCADE_OFFLINE", "HF_HUB_OFFLINE")
    )


def locked(path: Path) -> AbstractContextManager:
    """A lock between processes: all ranks of a training run create the same model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return WeakFileLock(path.with_name(f".{path.name}.lock"))


def download(url: str, path: Path, name: str) -> None:
    """Download `url` to `path`. An interrupted download leaves `path`.partial, which the next call continues.

    `name` is that of the release, for messages.
    """
    by_hand = f"Or download {url} elsewhere and run `saccade pull {name} --from FILE`."
    if is_offline():
        raise DownloadError(
            f"expected {name} in {home()}, as SACCADE_OFFLINE or HF_HUB_OFFLINE forbids downloads. Unset it. {by_hand}"
        )
    partial = path.with_name(f"{path.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    start = partial.stat().st_size if partial.exists() else 0
    address = url.replace("https://github.com", os.environ.get("SACCADE_MIRROR", "https://github.com").rstrip("/"), 1)
    headers = {"User-Agent": "saccade"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with urlopen(Request(address, headers=headers), timeout=TIMEOUT) as response:
            if response.status != 206:  # the server sends everything
                start = 0
            length = response.headers.get("Content-Length")
            total = start + int(length) if length else None
            with partial.open("ab" if start else "wb") as file:
                _copy(response, file, start, total, path.name)
    except HTTPError as error:
        partial.unlink(missing_ok=True)
        if error.code == 416 and start:  # the partial file is as long as the file, or longer
            return download(url, path, name)
        raise DownloadError(f"{name}: {address} returned HTTP {error.code} {error.reason}. {by_hand}") from error
    except (URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise DownloadError(f"{name}: no connection ({reason}). {_resume(partial)} {by_hand}") from error
    if total is not None and partial.stat().st_size < total:
        raise DownloadError(f"{name}: the connection ended early. {_resume(partial)}")
    with partial.open("rb") as file:
        first = file.read(256).lstrip().lower()
    if first.startswith((b"<!doctype", b"<html", b"<?xml")):
        partial.unlink()
        raise DownloadError(f"{name}: expected a file from {address}, got a web page. {by_hand}")
    os.replace(partial, path)


def _copy(response, file, start: int, total: int | None, label: str) -> None:
    with tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=label, disable=None) as bar:
        while chunk := response.read(CHUNK):
            file.write(chunk)
            bar.update(len(chunk))


def _resume(partial: Path) -> str:
    size = partial.stat().st_size if partial.exists() else 0
    return f"{size / 1e6:.1f} MB have arrived; run again to continue." if size else "Check the network and run again."


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        return digest.hexdigest()


def check_pin(key: str, digest: str) -> None:
    """Record the SHA-256 of a file on first use, in sha256.json of the cache; raise an error if it changes later."""
    path = home() / "sha256.json"
    with locked(path):
        pins = json.loads(path.read_text()) if path.is_file() else {}
        if pins.setdefault(key, digest) != digest:
            raise DownloadError(
                f"{key}: expected SHA-256 {pins[key]}, as on first use, got {digest}. If the authors replaced the "
                f"file, remove its line from {path} and run again."
            )
        write_file(path, json.dumps(pins, indent=2, sort_keys=True) + "\n")
