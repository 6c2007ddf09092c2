"""Draw docs/pictures/<data>.jpg: pictures that were held out, their truth, and what trained segmenters say.

python docs/make_segments.py --data camvid/ --split test --runs runs/*_camvid
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from saccade.data.masks import read_pair
from saccade.data.open_masks import open_mask_split
from saccade.engine.evaluate_masks import answer, look_at
from saccade.tasks.inference import WHOLE
from saccade.tasks.open import open_task_model
from saccade.tasks.segments import class_colours, overlay

HERE = Path(__file__).parent
BAR = 18  # px for the names above the pictures


@torch.inference_mode()
def labels_of(run: Path, images: list[Image.Image]) -> tuple[str, list[np.ndarray]]:
    model, card = open_task_model(run / "last.safetensors")
    found = []
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        shares = answer(model, look_at(pixels, card.preprocess, card.shorter), pixels.shape[2:], WHOLE, card.classes)
        found.append(shares.argmax(1)[0].byte().numpy())
    return f"{card.name} + {card.head}", found


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
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--runs", nargs="+", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--width", type=int, default=240)
    args = parser.parse_args()
    source = open_mask_split(args.data, args.split)
    chosen = np.linspace(0, len(source) - 1, args.pictures + 2, dtype=int)[1:-1].tolist()
    pairs = [read_pair(source, index) for index in chosen]
    images, colours = [image for image, _ in pairs], class_colours(len(source.classes))
    columns = [("picture", [np.asarray(image) for image in images])]
    answers = [("truth", [mask for _, mask in pairs])] + [labels_of(run, images) for run in args.runs]
    for name, labels in answers:
        painted = [overlay(np.asarray(i), own, colours) for i, own in zip(images, labels, strict=True)]
        columns.append((name, painted))
    target = HERE / "pictures" / f"{Path(args.data).name}.jpg"
    target.parent.mkdir(exist_ok=True)
    sheet(columns, args.width).save(target, quality=88)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
