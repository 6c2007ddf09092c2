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
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import saccade
from saccade._files import replaced_file
from saccade.data import VideoFile, photo_paths
from saccade.explanation import Inspection, inspect_image, summarize, summarize_token, summary_sheet
from saccade.web.catalogue import TASKS, Catalogue
from saccade.web.uploads import BadUpload, Limits, check_upload, read_upload, read_video

MAX_CACHED = 24  # results, a few megabytes each
MAX_DOWNLOADS = 64  # folders on disk
MAX_SIDE = 640  # pixels of the images that are segmented or searched for objects
MIN_SCORE = 0.05  # of the objects that are cached; the page and the API apply their own threshold

Result = TypeVar("Result")


def above(detections: saccade.Detections, threshold: float) -> saccade.Detections:
    """Return the objects with at least this score."""
    keep = detections.scores >= threshold
    masks = None if detections.masks is None else detections.masks[keep]
    boxes, labels, scores = detections.boxes[keep], detections.labels[keep], detections.scores[keep]
    return replace(detections, boxes=boxes, labels=labels, scores=scores, masks=masks)


class Service:
    """The requests that the page and its API make."""

    def __init__(self, catalogue: Catalogue, limits: Limits | None = None, folder: str | None = None):
        self.catalogue, self.limits = catalogue, limits or Limits()
        self.model_lock = Lock()  # hooks record one forward pass at a time
        self.cache: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self.cache_lock = Lock()
        self.folder = Path(folder or tempfile.mkdtemp(prefix="saccade-"))
        self.downloads: deque[Path] = deque()
        self.downloads_lock = Lock()
        self.photos = self._copy_photos()

    def _copy_photos(self) -> dict[str, Path]:
        """Copy the bundled photographs: nothing is served from the package folder."""
        (self.folder / "photos").mkdir(parents=True, exist_ok=True)
        return {n: Path(shutil.copy(path, self.folder / "photos")) for n, path in photo_paths().items()}

    def inspect(self, path: str | Path | None, model: str) -> Inspection:
        """Run a classifier on an image and explain its tokens."""

        def work(file: Path) -> Inspection:
            image = read_upload(file, self.limits)
            with self.model_lock:
                return inspect_image(self.catalogue.subject(model), image, file.name)

        return self._cached("inspect", path, self.catalogue.entry(model, ("classification",)).name, work)

    def displayable(self, path: str | None) -> str | None:
        """The path of an upload, or of a PNG copy beside it if it is a TIFF, which browsers do not show."""
        if not path or Path(path).suffix.lower() not in (".tif", ".tiff"):
            return path
        copy = Path(path).with_suffix(".png")
        with replaced_file(copy) as temporary:
            read_upload(Path(path), self.limits).save(temporary, "PNG")
        return str(copy)

    def predict(self, path: str | Path | None, model: str, tasks: tuple[str, ...] = TASKS) -> saccade.Prediction:
        """Run a model of any task on an image, or a video model on a video."""
        entry = self.catalogue.entry(model, tasks)
        options: dict[str, Any] = {"threshold": MIN_SCORE} if entry.task == "detection" else {}

        def work(file: Path) -> saccade.Prediction:
            image = (read_video if entry.task == "video" else read_upload)(file, self.limits)
            if entry.task in ("segmentation", "detection"):
                image.thumbnail((MAX_SIDE, MAX_SIDE))
            with self.model_lock:
                source: Any = VideoFile(file) if entry.task == "video" else image
                prediction: Any = saccade.predict(self.catalogue.model(entry.name), source, **options)[0]
            return replace(prediction, name=file.name, source=image)

        return self._cached("predict", path, entry.name, work)

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

    def write_prediction(self, prediction: saccade.Prediction, drawing: Any, model: str) -> tuple[str, str]:
        """Write a drawing as PNG and the prediction as JSON and return the paths."""
        png, text = self._download_paths(prediction.name, model)
        drawing.save(png)
        text.write_text(json.dumps(prediction.to_dict() | {"model": model}, indent=1))
        return str(png), str(text)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _cached(self, request: str, path: str | Path | None, model: str, work: Callable[[Path], Result]) -> Result:
        """Return a cached result without decoding the upload or waiting for the model, else compute it."""
        file = check_upload(path, self.limits)
        try:
            key = (request, hashlib.sha256(file.read_bytes()).hexdigest(), model)
        except OSError as error:
            raise BadUpload("The upload has expired. Please upload it again.") from error
        with self.cache_lock:
            if key in self.cache:
                self.cache.move_to_end(key)
                return self.cache[key]
        result = work(file)
        with self.cache_lock:
            self.cache[key] = result
            while len(self.cache) > MAX_CACHED:
                self.cache.popitem(last=False)
        return result

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
