"""Draw what segmenters say.

python docs/make_segments.py                                    # bundled photographs, embedded weights: segments.jpg
python docs/make_segments.py --data my/ --split test --runs runs/*   # held-out pictures, their truth, runs: my.jpg

CamVid's pictures are not ours to pass on: what is drawn from them stays out of the repository.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

sys.path.insert(0, str(Path(__file__).parent.parent))

from saccade.data.masks import read_pair
from saccade.data.open_masks import open_mask_split
from saccade.data.photos import photo_paths
from saccade.engine.evaluate_masks import answer, look_at
from saccade.explain.drawing.figure import Figure, Panel
from saccade.tasks.inference import WHOLE
from saccade.tasks.open import open_task_model
from saccade.tasks.segments import areas, class_colours, overlay

HERE = Path(__file__).parent
BAR = 18  # px for the names above the pictures
EMBEDDED, PHOTOS, SHORTER = "paca_nano+paca.camvid", ("camera", "rocket"), 360  # px: the height of CamVid's pictures
NAMED = 0.03  # share of a picture from which on a class is named in it


@torch.inference_mode()
def labels_of(
    weights: str | Path, images: list[Image.Image], shorter: int | None = None
) -> tuple[str, list[np.ndarray], list[str]]:
    model, card = open_task_model(weights)
    found = []
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        seen = look_at(pixels, card.preprocess, shorter or card.shorter)
        shares = answer(model, seen, pixels.shape[2:], WHOLE, card.classes)
        found.append(shares.argmax(1)[0].byte().numpy())
    return f"{card.name} + {card.head}", found, card.names


def photographs() -> Image.Image:
    """Each photograph beside its classes, which stand in it by name."""
    images = [Image.open(photo_paths()[photo]).convert("RGB") for photo in PHOTOS]
    _, answers, classes = labels_of(EMBEDDED, images, SHORTER)
    panels = []
    for photo, image, labels in zip(PHOTOS, images, answers, strict=True):
        painted = Image.fromarray(overlay(np.asarray(image), labels, class_colours(len(classes)), 0.5))
        found = areas(labels, classes)
        for each in found:
            if each["share"] >= NAMED:
                write_name(painted, labels == each["class"], each["name"])
        panels.append(Panel(np.asarray(image), f"{photo}.jpg"))
        words = ", ".join(f"{each['name']} {each['share']:.0%}" for each in found if each["share"] >= 0.01)
        panels.append(Panel(np.asarray(painted), "a class for every pixel", words))
    caption = (
        f"{EMBEDDED} at {SHORTER} px. It learned from one town's streets, and knows 11 things: a lawn must be a road."
    )
    return Figure("segments", "What a segmenter of streets makes of other places", caption, panels, 4).image(270)


def write_name(picture: Image.Image, mask: np.ndarray, name: str) -> None:
    """Where the class is farthest from its borders: at the brightest place of its blurred mask."""
    padded = Image.fromarray(np.pad(mask, 60).astype(np.uint8) * 255)  # the rim of the picture is a border too
    blurred = np.asarray(padded.filter(ImageFilter.GaussianBlur(24)))[60:-60, 60:-60]
    y, x = np.unravel_index(blurred.argmax(), blurred.shape)
    font = ImageFont.load_default(picture.width / 17)
    x = min(max(x, font.getlength(name) / 2 + 6), picture.width - font.getlength(name) / 2 - 6)
    ImageDraw.Draw(picture).text((x, y), name, "white", font, "mm", stroke_width=2, stroke_fill=(26, 32, 40))


def sheet(columns: list[tuple[str, list[np.ndarray]]], width: int) -> Image.Image:
    height = round(width * columns[0][1][0].shape[0] / columns[0][1][0].shape[1])
    canvas = Image.new("RGB", (width * len(columns), BAR + height * len(columns[0][1])), "white")
    draw = ImageDraw.Draw(canvas)
    for i, (name, pictures) in enumerate(columns):
        draw.text((i * width + 4, 3), name, fill="black")
        for j, picture in enumerate(pictures):
            small = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
            canvas.paste(small, (i * width, BAR + j * height))
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a set with masks; the bundled photographs without")
    parser.add_argument("--split", default="test")
    parser.add_argument("--runs", nargs="+", type=Path, default=[])
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--width", type=int, default=240)
    args = parser.parse_args()
    if not args.data:
        target = HERE / "pictures/segments.jpg"
        photographs().save(target, quality=80, optimize=True)
        print(f"wrote {target}, {target.stat().st_size // 1024} KB")
        return
    source = open_mask_split(args.data, args.split)
    chosen = np.linspace(0, len(source) - 1, args.pictures + 2, dtype=int)[1:-1].tolist()
    pairs = [read_pair(source, index) for index in chosen]
    images, colours = [image for image, _ in pairs], class_colours(len(source.classes))
    columns = [("picture", [np.asarray(image) for image in images])]
    answers = [("truth", [mask for _, mask in pairs])] + [
        labels_of(run / "last.safetensors", images)[:2] for run in args.runs
    ]
    for name, labels in answers:
        painted = [overlay(np.asarray(i), own, colours) for i, own in zip(images, labels, strict=True)]
        columns.append((name, painted))
    target = HERE / "pictures" / f"{Path(args.data).name}.jpg"
    target.parent.mkdir(exist_ok=True)
    sheet(columns, args.width).save(target, quality=88)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
