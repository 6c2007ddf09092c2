"""Requests of the page and its API: check the upload, run the model, cache the result.

Requests are stateless: each names its image and model, so results cannot reach the wrong client and a client that
disconnects leaves nothing to clean up. Results are cached by image content, at most `MAX_CACHED` of them.
"""

import hashlib
import json
import shutil
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from PIL import Image

from saccade.data.synthetic.photos import photo_paths
from saccade.web.catalogue import Catalogue
from saccade.web.inspection import Inspection, inspect_image, summarize, summarize_token, summary_sheet
from saccade.web.segmentation import Segmentation, segment_image
from saccade.web.uploads import BadUpload, Limits, read_upload

MAX_CACHED = 24  # results, a few megabytes each
MAX_DOWNLOADS = 64  # folders on disk

Result = TypeVar("Result")


class Service:
    """The requests that the page and its API make."""

    def __init__(self, catalogue: Catalogue, limits: Limits | None = None, folder: str | None = None):
        self.catalogue, self.limits = catalogue, limits or Limits()
        self.model_lock = Lock()  # hooks record one forward pass at a time
        self.cache: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self.folder = Path(folder or tempfile.mkdtemp(prefix="saccade-"))
        self.downloads: deque[Path] = deque()
        self.downloads_lock = Lock()
        self.photos = self._copy_photos()

    def _copy_photos(self) -> dict[str, Path]:
        """Copy the bundled photographs: nothing is served from the package folder."""
        (self.folder / "photos").mkdir(parents=True, exist_ok=True)
        return {n: Path(shutil.copy(path, self.folder / "photos")) for n, path in photo_paths().items()}

    def inspect(self, path: str | None, model: str) -> Inspection:
        """Run a classifier on an image."""

        def work(image: Image.Image, name: str) -> Inspection:
            return inspect_image(self.catalogue.classifier(model), image, name)

        return self._cached("inspect", path, model, work)

    def segment(self, path: str | None, model: str) -> Segmentation:
        """Run a segmenter on an image."""

        def work(image: Image.Image, name: str) -> Segmentation:
            return segment_image(*self.catalogue.segmenter(model), image, name, model)

        return self._cached("segment", path, model, work)

    def token(self, inspection: Inspection, stage: int, token: int) -> dict[str, Any]:
        """Summarize one token; runs the model once more, for the occlusion."""
        with self.model_lock:
            return summarize_token(inspection, stage, token)

    def write_inspection(self, inspection: Inspection, stage: int, token: int) -> tuple[str, str]:
        """Write an inspection as PNG and JSON and return the paths."""
        png, text = self._download_paths(inspection.name, inspection.subject.name)
        summary_sheet(inspection, stage, token).save(png)
        summary = summarize(inspection) | {"token": self.token(inspection, stage, token)}
        text.write_text(json.dumps(summary, indent=1))
        return str(png), str(text)

    def write_segmentation(self, segmentation: Segmentation, opacity: float) -> tuple[str, str]:
        """Write the overlay as PNG and the areas as JSON and return the paths."""
        png, text = self._download_paths(segmentation.name, segmentation.model)
        Image.fromarray(segmentation.draw(opacity)).save(png)
        summary = {"image": segmentation.name, "model": segmentation.model, "areas": segmentation.areas()}
        text.write_text(json.dumps(summary, indent=1))
        return str(png), str(text)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _cached(self, request: str, path: str | None, model: str, work: Callable[[Image.Image, str], Result]) -> Result:
        image = read_upload(path, self.limits)
        assert path is not None
        try:
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise BadUpload("The upload has expired. Please upload it again.") from error
        key = (request, content, model)
        with self.model_lock:
            if key not in self.cache:
                self.cache[key] = work(image, Path(path).name)
            self.cache.move_to_end(key)
            while len(self.cache) > MAX_CACHED:
                self.cache.popitem(last=False)
            return self.cache[key]

    def _download_paths(self, image: str, model: str) -> tuple[Path, Path]:
        """Return the paths of a PNG and a JSON file in a new folder; delete the oldest folders."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        with self.downloads_lock:
            self.downloads.append(folder)
            expired = [self.downloads.popleft() for _ in range(len(self.downloads) - MAX_DOWNLOADS)]
        for old in expired:
            shutil.rmtree(old, ignore_errors=True)
        stem = f"{Path(image).stem}-{model}"
        return folder / f"{stem}.png", folder / f"{stem}.json"
