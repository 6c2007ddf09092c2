"""What stands behind every door of the page: uploads checked, models asked one at a time, recent looks remembered.

No session is kept: a request names its picture and its model, so no answer can reach the wrong person, and a client
that goes away leaves nothing behind. Looks are remembered by the picture's content, at most `KEPT` of them.
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

from saccade.data.synthetic.photos import photo_paths
from saccade.web.catalogue import Catalogue
from saccade.web.look import Look, facts, look_at, sheet, token_facts
from saccade.web.segment import Segmented, segment
from saccade.web.uploads import BadUpload, Limits, read_upload

KEPT = 24  # looks remembered, a few megabytes each
FILES = 64  # downloads kept on disk

Answer = TypeVar("Answer")


class Service:
    """Everything the page and its API can ask for."""

    def __init__(self, catalogue: Catalogue, limits: Limits | None = None, folder: str | None = None):
        self.catalogue, self.limits = catalogue, limits or Limits()
        self.turn = Lock()  # one forward pass at a time: models are listened to from outside, and cores are few
        self.memory: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self.folder = Path(folder or tempfile.mkdtemp(prefix="saccade-"))
        self.files: deque[Path] = deque()
        self.files_lock = Lock()
        self.photos = self._copy_photos()

    def _copy_photos(self) -> dict[str, Path]:
        """The bundled photographs as files of the service: nothing is served from the package's own folder."""
        (self.folder / "photos").mkdir(parents=True, exist_ok=True)
        return {n: Path(shutil.copy(path, self.folder / "photos")) for n, path in photo_paths().items()}

    def look(self, path: str | None, model: str) -> Look:
        """A classifier on a picture."""

        def work(picture, name: str) -> Look:
            return look_at(self.catalogue.classifier(model), picture, name)

        return self._remembered("look", path, model, work)

    def segment(self, path: str | None, model: str) -> Segmented:
        """A segmenter on a picture."""

        def work(picture, name: str) -> Segmented:
            return segment(*self.catalogue.segmenter(model), picture, name, model)

        return self._remembered("segment", path, model, work)

    def token(self, look: Look, stage: int, token: int) -> dict[str, Any]:
        """Numbers of one token; asks the model once more."""
        with self.turn:
            return token_facts(look, stage, token)

    def downloads(self, look: Look, stage: int, token: int) -> tuple[str, str]:
        """A PNG and a JSON file about a look."""
        place = self._new_place()
        stem = f"{Path(look.name).stem}-{look.subject.name}"
        png, text = place / f"{stem}.png", place / f"{stem}.json"
        sheet(look, stage, token).save(png)
        text.write_text(json.dumps(facts(look) | {"token": self.token(look, stage, token)}, indent=1))
        return str(png), str(text)

    def segment_downloads(self, found: Segmented, opacity: float) -> tuple[str, str]:
        """The overlay as PNG, and the areas as JSON."""
        from PIL import Image

        place = self._new_place()
        stem = f"{Path(found.name).stem}-{found.model}"
        png, text = place / f"{stem}.png", place / f"{stem}.json"
        Image.fromarray(found.draw(opacity)).save(png)
        text.write_text(json.dumps({"picture": found.name, "model": found.model, "areas": found.areas()}, indent=1))
        return str(png), str(text)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remembered(self, kind: str, path: str | None, model: str, work: Callable[[Any, str], Answer]) -> Answer:
        picture = read_upload(path, self.limits)
        assert path is not None
        try:
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            raise BadUpload("The upload is gone. Please send it again.") from error
        key = (kind, content, model)
        with self.turn:
            if key not in self.memory:
                self.memory[key] = work(picture, Path(path).name)
            self.memory.move_to_end(key)
            while len(self.memory) > KEPT:
                self.memory.popitem(last=False)
            return self.memory[key]

    def _new_place(self) -> Path:
        """A folder of its own for one pair of files, so that they can have plain names; the oldest goes."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        with self.files_lock:
            self.files.append(place)
            old = [self.files.popleft() for _ in range(len(self.files) - FILES)]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return place
