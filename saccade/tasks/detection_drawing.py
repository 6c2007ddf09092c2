"""Detections drawn on their picture: boxes, names, scores and masks."""

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

ROOM = 0.15  # share of the picture that names may hide
Place = tuple[float, float, float, float]


def draw_detections(
    image: Image.Image,
    prediction: Mapping[str, Tensor],
    classes: Sequence[str] = (),
    threshold: float = 0.5,
    names: bool | None = None,
) -> Image.Image:
    """What a detector found, from `threshold` on; the surest on top.

    A colour stands for a class or, where all are of one, for an object. `names` writes class and score beside every
    box, but not over a surer one's; by default where they leave room for the picture.
    """
    found = [entry for entry in describe_detections(prediction, classes) if entry["score"] >= threshold][::-1]
    kinds = {entry["label"] for entry in found}
    masks = prediction.get("masks")
    canvas = np.asarray(image.convert("RGB"), dtype=np.float32).copy()
    colours = [colour_of(entry["label"] if len(kinds) > 1 else i) for i, entry in enumerate(found)]
    for entry, colour in zip(found, colours, strict=True):
        if masks is not None:
            inside = masks[entry["index"], 0].cpu().numpy() >= 0.5
            canvas[inside] += 0.45 * (np.array(colour, np.float32) - canvas[inside])
    drawn = Image.fromarray(canvas.astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
    thick = max(1, round(min(image.size) / 300))
    font = ImageFont.load_default(max(10, round(min(image.size) / 45)))
    texts = [f"{entry['name']}  {entry['score']:.2f}" for entry in found]  # small letters swallow a single space
    room = ROOM * image.width * image.height
    if names is None:
        names = len(found) == 1 or sum(w * h for w, h in (_size(pen, text, font) for text in texts)) <= room
    for entry, colour in zip(found, colours, strict=True):
        pen.rectangle(entry["box"], outline=colour, width=thick)
    written: list[Place] = []
    for entry, colour, text in list(zip(found, colours, texts, strict=True))[::-1] if names else ():
        place = _free_place(_size(pen, text, font), entry["box"], image.size, written)
        if place is not None:
            written.append(place)
            _write(pen, text, place, colour, font)
    return drawn


def describe_detections(prediction: Mapping[str, Tensor], classes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """For JSON: label, name, score, box x0 y0 x1 y1 in pixels and place in the prediction, the surest first."""
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


def colour_of(number: int) -> tuple[int, int, int]:
    """Far apart for neighbouring numbers: steps of the golden angle around the colour wheel."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.75, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def _size(pen: ImageDraw.ImageDraw, text: str, font: Any) -> tuple[float, float]:
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    return right - left + 4, bottom - top + 2


def _free_place(
    size: tuple[float, float], box: Sequence[float], picture: tuple[int, int], taken: Sequence[Place]
) -> Place | None:
    """Above the box, under it, or inside at its top, within the picture and on no other name; None where none is."""
    width, height = size
    x = max(0.0, min(box[0], picture[0] - 1 - width))
    for y in (box[1] - height, box[3], box[1]):
        place = (x, y, x + width, y + height)
        clear = all(x >= p[2] or place[2] <= p[0] or y >= p[3] or place[3] <= p[1] for p in taken)
        if clear and y >= 0 and place[3] < picture[1]:
            return place
    return None


def _write(pen: ImageDraw.ImageDraw, text: str, place: Place, colour: tuple[int, int, int], font: Any) -> None:
    left, top, _, _ = pen.textbbox((0, 0), text, font=font)
    pen.rectangle(place, fill=colour)
    pen.text((place[0] + 2 - left, place[1] + 1 - top), text, fill=(0, 0, 0), font=font)
