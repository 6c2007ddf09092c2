"""Draw detections on an image: boxes, masks, class names and scores."""

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MAX_TEXT_FRACTION = 0.15  # of the image that text may cover by default
TextBox = tuple[float, float, float, float]


def draw_detections(
    image: Image.Image,
    prediction: Mapping[str, Tensor],
    classes: Sequence[str] = (),
    threshold: float = 0.5,
    names: bool | None = None,
) -> Image.Image:
    """Draw detections with a score of at least `threshold`, the highest score on top.

    Colours are per class or, if all objects have one class, per object. `names` writes class and score next to every
    box, without covering the text of a higher score; by default only if the text leaves most of the image visible.
    """
    shown = [entry for entry in describe_detections(prediction, classes) if entry["score"] >= threshold][::-1]
    labels = {entry["label"] for entry in shown}
    masks = prediction.get("masks")
    canvas = np.asarray(image.convert("RGB"), dtype=np.float32).copy()
    colours = [object_colour(entry["label"] if len(labels) > 1 else i) for i, entry in enumerate(shown)]
    for entry, colour in zip(shown, colours, strict=True):
        if masks is not None:
            inside = masks[entry["index"], 0].cpu().numpy() >= 0.5
            canvas[inside] += 0.45 * (np.array(colour, np.float32) - canvas[inside])
    drawn = Image.fromarray(canvas.astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
    line_width = max(1, round(min(image.size) / 300))
    font = ImageFont.load_default(max(10, round(min(image.size) / 45)))
    texts = [f"{entry['name']}  {entry['score']:.2f}" for entry in shown]  # two spaces: one is too narrow when small
    if names is None:
        text_area = sum(w * h for w, h in (_text_size(pen, text, font) for text in texts))
        names = len(shown) == 1 or text_area <= MAX_TEXT_FRACTION * image.width * image.height
    for entry, colour in zip(shown, colours, strict=True):
        pen.rectangle(entry["box"], outline=colour, width=line_width)
    written: list[TextBox] = []
    for entry, colour, text in list(zip(shown, colours, texts, strict=True))[::-1] if names else ():
        place = _place_text(_text_size(pen, text, font), entry["box"], image.size, written)
        if place is not None:
            written.append(place)
            _write_text(pen, text, place, colour, font)
    return drawn


def describe_detections(prediction: Mapping[str, Tensor], classes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """JSON entries by descending score: label, name, score, box x0 y0 x1 y1 in pixels, index in the prediction."""
    scores, labels = prediction["scores"].tolist(), prediction["labels"].tolist()
    boxes = prediction["boxes"].tolist()
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [
        {
            "label": labels[i],
            "name": classes[labels[i] - 1] if labels[i] <= len(classes) else str(labels[i]),
            "score": scores[i],
            "box": boxes[i],
            "index": i,
        }
        for i in order
    ]


def object_colour(index: int) -> tuple[int, int, int]:
    """RGB in golden-ratio steps of the hue, so that neighbouring indices differ."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.75, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def _text_size(pen: ImageDraw.ImageDraw, text: str, font: Any) -> tuple[float, float]:
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    return right - left + 4, bottom - top + 2


def _place_text(
    size: tuple[float, float], box: Sequence[float], image_size: tuple[int, int], taken: Sequence[TextBox]
) -> TextBox | None:
    """Above the box, below it, or inside at its top: the first place in the image that overlaps no other text."""
    width, height = size
    x = max(0.0, min(box[0], image_size[0] - 1 - width))
    for y in (box[1] - height, box[3], box[1]):
        place = (x, y, x + width, y + height)
        free = all(x >= p[2] or place[2] <= p[0] or y >= p[3] or place[3] <= p[1] for p in taken)
        if free and y >= 0 and place[3] < image_size[1]:
            return place
    return None


def _write_text(pen: ImageDraw.ImageDraw, text: str, place: TextBox, colour: tuple[int, int, int], font: Any) -> None:
    left, top, _, _ = pen.textbbox((0, 0), text, font=font)
    pen.rectangle(place, fill=colour)
    pen.text((place[0] + 2 - left, place[1] + 1 - top), text, fill=(0, 0, 0), font=font)
