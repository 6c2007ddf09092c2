"""Predictions of one image or video, typed per task: as data, drawn, and written to files."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from saccade._files import png_bytes, unique_stem, write_file, write_json
from saccade.data.decode.inputs import ImageInput, read_input, read_video_input
from saccade.data.decode.video import middle_frame
from saccade.tasks.detection_drawing import describe_detections, draw_detections
from saccade.tasks.segmentation_drawing import class_areas, class_colours, overlay_labels, palette_image


class ClassScore(NamedTuple):
    """One class of a classification."""

    index: int
    name: str
    probability: float


@dataclass(repr=False)
class Prediction:
    """What a model predicts for one input: base of the results of all tasks."""

    name: str  # file name, "image" for inputs without one
    source: ImageInput = field(compare=False)  # as passed; a path is read again for drawing

    @property
    def image(self) -> Image.Image:
        """The input as an RGB image."""
        return read_input(self.source)

    def to_dict(self) -> dict[str, Any]:
        """The prediction as JSON-serialisable data."""
        raise NotImplementedError

    def draw(self) -> Image.Image:
        """The input with the prediction drawn on it."""
        raise NotImplementedError

    def save(self, folder: str | Path, stem: str | None = None) -> dict[str, str]:
        """Write the drawing and the data into `folder`, atomically; returns the names of the images by kind."""
        stem = stem or Path(self.name).stem
        files = self.save_images(folder, stem)
        write_json(Path(folder) / f"{stem}.json", self.to_dict() | files)
        return files

    def save_images(self, folder: str | Path, stem: str | None = None) -> dict[str, str]:
        """Write the drawing into `folder`, atomically; returns the file names by kind."""
        stem = stem or Path(self.name).stem
        return {"overlay": save_png(self.draw(), Path(folder) / f"{stem}_{self._suffix}.png")}

    _suffix = "prediction"

    def _summary(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {self._summary()})"

    def __str__(self) -> str:
        return f"{self.name}: {self._summary()}"

    def _repr_png_(self) -> bytes:
        return png_bytes(self.draw())


@dataclass(repr=False)
class Classification(Prediction):
    """Classes of an image, most probable first. Of a multi-label model, every class has its own probability."""

    classes: list[ClassScore]
    probabilities: np.ndarray = field(compare=False)  # (K,) of all classes
    embedding: np.ndarray | None = field(default=None, compare=False)  # (D,) features before the classifier
    labels: list[str] | None = None  # of a multi-label model: the classes with at least the threshold

    @property
    def label(self) -> str:
        """Name of the most probable class."""
        return self.classes[0].name

    @property
    def probability(self) -> float:
        """Probability of the most probable class."""
        return self.classes[0].probability

    def to_dict(self) -> dict[str, Any]:
        classes = [{"class": c.index, "name": c.name, "probability": c.probability} for c in self.classes]
        return {"image": self.name, "classes": classes} | ({} if self.labels is None else {"labels": self.labels})

    def draw(self) -> Image.Image:
        """The image above a bar chart of its classes."""
        image = self.image
        image.thumbnail((512, 512))
        font = ImageFont.load_default(15)
        width, row = max(image.width, 280), 22
        sheet = Image.new("RGB", (width, image.height + row * len(self.classes) + 8), "white")
        sheet.paste(image, ((width - image.width) // 2, 0))
        pen = ImageDraw.Draw(sheet)
        for i, (_, name, probability) in enumerate(self.classes):
            top = image.height + 6 + i * row
            pen.rectangle((0, top, round((width - 1) * probability), top + row - 4), fill=(190, 215, 245))
            pen.text((6, top), f"{100 * probability:.1f} %  {name}", fill="black", font=font)
        return sheet

    def _summary(self) -> str:
        return ", ".join(f"{c.name} {100 * c.probability:.1f} %" for c in self.classes)


@dataclass(repr=False)
class ClipPrediction(Classification):
    """Classes of a video, averaged over its views."""

    frames: int = 0  # per view
    views: int = 1  # clips times crops

    @property
    def image(self) -> Image.Image:
        """The middle frame."""
        return middle_frame(self.source if isinstance(self.source, Image.Image) else read_video_input(self.source))

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"frames": self.frames, "views": self.views}


@dataclass(repr=False)
class Segmentation(Prediction):
    """The class of every pixel."""

    labels: np.ndarray  # (H, W) class indices, at the size of the image
    names: list[str]

    def areas(self) -> list[dict[str, Any]]:
        """The classes present with the fraction of the image each covers and its colour, largest first."""
        colours = class_colours(len(self.names))
        return [
            row
            | {"share": round(float(row["share"]), 6), "colour": "#{:02x}{:02x}{:02x}".format(*colours[row["class"]])}
            for row in class_areas(self.labels, self.names)
        ]

    def to_dict(self) -> dict[str, Any]:
        height, width = self.labels.shape
        return {"image": self.name, "size": [width, height], "classes": self.areas()}

    def draw(self, opacity: float = 0.55) -> Image.Image:
        image = self.image
        if image.size != self.labels.shape[::-1]:
            image = image.resize(self.labels.shape[::-1], Image.Resampling.BICUBIC)
        colours = class_colours(len(self.names))
        return Image.fromarray(overlay_labels(np.asarray(image), self.labels, colours, min(max(opacity, 0.0), 1.0)))

    def palette_image(self) -> Image.Image:
        """An image whose values are the class indices, with a palette up to 256 classes."""
        return palette_image(self.labels, class_colours(len(self.names)))

    def save_images(self, folder: str | Path, stem: str | None = None) -> dict[str, str]:
        """Write the palette image of the labels and the overlay."""
        folder, stem = Path(folder), stem or Path(self.name).stem
        labels = save_png(self.palette_image(), folder / f"{stem}_labels.png")
        return {"labels": labels, "overlay": save_png(self.draw(), folder / f"{stem}_overlay.png")}

    def _summary(self) -> str:
        return ", ".join(f"{row['name']} {100 * row['share']:.1f} %" for row in self.areas())


@dataclass(repr=False)
class Detections(Prediction):
    """Objects of an image, most certain first."""

    boxes: Tensor  # (n, 4) x0 y0 x1 y1 in pixels
    labels: Tensor  # (n,) from 1
    scores: Tensor  # (n,)
    names: list[str]  # of the classes
    masks: Tensor | None = None  # (n, H, W) bool
    size: tuple[int, int] = (0, 0)  # width, height of the image

    _suffix = "objects"

    def __len__(self) -> int:
        return len(self.boxes)

    def objects(self) -> list[dict[str, Any]]:
        """Label, name, score, box, and the mask in COCO's run-length encoding."""
        from saccade.tasks.coco_metric import encode_masks

        objects = describe_detections(self._tensors(), self.names)
        codes = encode_masks(self.masks) if self.masks is not None else None
        for entry in objects:
            index = entry.pop("index")
            if codes is not None:
                entry["segmentation"] = codes[index]
        return objects

    def to_dict(self) -> dict[str, Any]:
        return {"image": self.name, "size": list(self.size), "objects": self.objects()}

    def draw(self) -> Image.Image:
        return draw_detections(self.image, self._tensors(), self.names, threshold=0.0)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"boxes": self.boxes, "labels": self.labels, "scores": self.scores}
        return tensors if self.masks is None else tensors | {"masks": self.masks[:, None].float()}

    def _summary(self) -> str:
        counts = Counter(entry["name"] for entry in describe_detections(self._tensors(), self.names))
        return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no objects"


class Unreadable(NamedTuple):
    """An input that could not be read."""

    name: str
    source: ImageInput
    error: str

    def to_dict(self) -> dict[str, Any]:
        return {"image": self.name, "error": self.error}


class Predictions(list[Prediction]):
    """Predictions in the order of the inputs; `skipped` has the reason for every input that could not be read."""

    def __init__(self, predictions: Iterable[Prediction] = (), skipped: Sequence[Unreadable] = ()):
        super().__init__(predictions)
        self.skipped = list(skipped)

    def to_dict(self) -> dict[str, Any]:
        return {
            "predictions": [prediction.to_dict() for prediction in self],
            "skipped": [entry.to_dict() for entry in self.skipped],
        }

    def save(self, folder: str | Path) -> Path:
        """Write drawings and predictions.json into `folder`; returns the path of the latter."""
        stems: set[str] = set()
        rows = []
        for prediction in self:
            stem = unique_stem(prediction.name, stems)
            rows.append(prediction.to_dict() | prediction.save_images(folder, stem))
        document = {"predictions": rows, "skipped": [entry.to_dict() for entry in self.skipped]}
        return write_json(Path(folder) / "predictions.json", document)

    def _repr_html_(self) -> str:
        from base64 import b64encode

        cells = []
        for prediction in self[:12]:
            drawn = prediction.draw()
            drawn.thumbnail((320, 320))
            data = b64encode(png_bytes(drawn)).decode()
            image = f'<img src="data:image/png;base64,{data}">'
            caption = f"<figcaption>{escape(str(prediction))}</figcaption>"
            cells.append(f'<figure style="display:inline-block;margin:8px;max-width:320px">{image}{caption}</figure>')
        hidden = len(self) - len(cells)
        return "".join(cells) + (f"<p>and {hidden} more</p>" if hidden > 0 else "")


def save_png(image: Image.Image, path: Path) -> str:
    """Write a PNG atomically and return its file name."""
    return write_file(path, png_bytes(image)).name
