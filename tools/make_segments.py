"""Draw predictions of segmenters.

python tools/make_segments.py                                    # bundled photographs, embedded weights: segments.jpg
python tools/make_segments.py --data my/ --split test --runs runs/*   # held-out images, ground truth, runs: my.jpg

CamVid's images may not be redistributed: do not commit figures drawn from them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

sys.path.insert(0, str(Path(__file__).parent.parent))

import saccade
from saccade.data.open import find_mask_splits, open_split
from saccade.data.sources.masks import read_pair
from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.tasks.segmentation_drawing import class_areas, class_colours, overlay_labels

DOCS = Path(__file__).parents[1] / "docs"
BAR = 18  # px for the names above the images
EMBEDDED, PHOTOS, SHORTER = "paca_nano+paca.camvid", ("camera", "rocket"), 360  # px: the height of CamVid's images
NAMED = 0.03  # minimum fraction of the image for a class to be named in it


def predict_label_maps(
    weights: str | Path, images: list[Image.Image], shorter: int | None = None
) -> tuple[str, list[np.ndarray], list[str]]:
    model = saccade.load(weights)
    card = model.card
    predicted = [each.labels for each in saccade.predict(model, images, size=shorter, window=0)]
    return f"{card.name} + {card.head}", predicted, card.names


def photographs() -> Image.Image:
    """Each photograph next to its predicted classes, named in the image."""
    images = [Image.open(photo_paths()[photo]).convert("RGB") for photo in PHOTOS]
    _, predictions, classes = predict_label_maps(EMBEDDED, images, SHORTER)
    panels = []
    for photo, image, labels in zip(PHOTOS, images, predictions, strict=True):
        painted = Image.fromarray(overlay_labels(np.asarray(image), labels, class_colours(len(classes)), 0.5))
        areas = class_areas(labels, classes)
        for each in areas:
            if each["share"] >= NAMED:
                write_name(painted, labels == each["class"], each["name"])
        panels.append(Panel(np.asarray(image), f"{photo}.jpg"))
        words = ", ".join(f"{each['name']} {each['share']:.0%}" for each in areas if each["share"] >= 0.01)
        panels.append(Panel(np.asarray(painted), "predicted classes", words))
    caption = (
        f"{EMBEDDED} at {SHORTER} px, trained on the streets of one town with 11 classes: it predicts a lawn as road."
    )
    return Figure("segments", "A segmenter of street scenes on other images", caption, panels, 4).image(270)


def write_name(image: Image.Image, mask: np.ndarray, name: str) -> None:
    """Write the name where the class is farthest from its borders: at the maximum of the blurred mask."""
    padded = Image.fromarray(np.pad(mask, 60).astype(np.uint8) * 255)  # the edge of the image is a border too
    blurred = np.asarray(padded.filter(ImageFilter.GaussianBlur(24)))[60:-60, 60:-60]
    y, x = np.unravel_index(blurred.argmax(), blurred.shape)
    font = ImageFont.load_default(image.width / 17)
    x = min(max(x, font.getlength(name) / 2 + 6), image.width - font.getlength(name) / 2 - 6)
    ImageDraw.Draw(image).text((x, y), name, "white", font, "mm", stroke_width=2, stroke_fill=(26, 32, 40))


def sheet(columns: list[tuple[str, list[np.ndarray]]], width: int) -> Image.Image:
    height = round(width * columns[0][1][0].shape[0] / columns[0][1][0].shape[1])
    canvas = Image.new("RGB", (width * len(columns), BAR + height * len(columns[0][1])), "white")
    draw = ImageDraw.Draw(canvas)
    for i, (name, images) in enumerate(columns):
        draw.text((i * width + 4, 3), name, fill="black")
        for j, image in enumerate(images):
            small = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
            canvas.paste(small, (i * width, BAR + j * height))
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a dataset with masks; default: the bundled photographs")
    parser.add_argument("--split", default="test")
    parser.add_argument("--runs", nargs="+", type=Path, default=[])
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--width", type=int, default=240)
    args = parser.parse_args()
    if not args.data:
        target = DOCS / "figures/segments.jpg"
        photographs().save(target, quality=80, optimize=True)
        print(f"wrote {target}, {target.stat().st_size // 1024} KB")
        return
    source = open_split(args.data, args.split, find=find_mask_splits)
    chosen = np.linspace(0, len(source) - 1, args.images + 2, dtype=int)[1:-1].tolist()
    pairs = [read_pair(source, index) for index in chosen]
    images, colours = [image for image, _ in pairs], class_colours(len(source.classes))
    columns = [("image", [np.asarray(image) for image in images])]
    label_maps = [("truth", [mask for _, mask in pairs])] + [
        predict_label_maps(run / "last.safetensors", images)[:2] for run in args.runs
    ]
    for name, labels in label_maps:
        drawn = [overlay_labels(np.asarray(i), own, colours) for i, own in zip(images, labels, strict=True)]
        columns.append((name, drawn))
    target = DOCS / "figures" / f"{Path(args.data).name}.jpg"
    target.parent.mkdir(exist_ok=True)
    sheet(columns, args.width).save(target, quality=88)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
