"""`saccade predict`: what a checkpoint says about pictures, in the form of its task.

A task is one function here: (model, card, path, args, device) -> what to say about one picture, as a dict; it writes
its own files into --out.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.cli.task_options import SEGMENTATION, Options, add_inference_arguments, check_options

HELP = "predict on pictures or videos: classes, a class for every pixel, or objects; drawn, and as JSON"
EXAMPLE = "saccade predict runs/masks photo.jpg folder/ --out predictions"
LARGEST = 2_000_000  # pixels that are looked at as a whole, unless --window says otherwise
OPTIONS: Options = SEGMENTATION | {
    "top": (("classification",), 5),
    "views": (("classification",), (1, 1)),
    "flip": (("segmentation",), False),
    "threshold": (("detection",), 0.5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a .safetensors or .pth file, a run's folder, or embedded weights by name",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="picture or video files, or folders of them")
    parser.add_argument("--size", type=int, metavar="PX", help="side of the input (default: the checkpoint's)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes to name")
    parser.add_argument(
        "--views", type=int, nargs=2, default=(1, 1), metavar=("CLIPS", "CROPS"), help="of a video (papers: 4 3)"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    segmentation = add_inference_arguments(parser)
    segmentation.add_argument("--flip", action="store_true", help="average with the mirrored picture")
    group = parser.add_argument_group("detection")
    group.add_argument("--threshold", type=float, default=0.5, metavar="X", help="least score of a detection")


def run(args: argparse.Namespace) -> int:
    import sys

    import torch

    from saccade.cli import pick_device, print_json
    from saccade.data.decode.image import BadImage
    from saccade.tasks.open import open_task_model

    device = torch.device(pick_device(args.device))
    model, card = open_task_model(args.checkpoint)
    check_options(args, card.task, OPTIONS)
    predict = {"classification": classify, "segmentation": segment, "detection": detect}[card.task]
    model.to(device)
    found, bad = [], []
    for path, name in named(args.images, videos=card.preprocess.frames > 0):
        try:
            found.append({"image": str(path)} | predict(model, card, path, name, args, device))
        except BadImage as error:
            bad.append(str(error))
            print(f"saccade predict: skipped {error}", file=sys.stderr)
    document = {"checkpoint": str(args.checkpoint), "task": card.task, "predictions": found, "unreadable": bad}
    if args.out:
        write_json(Path(args.out) / "predictions.json", document)
    if args.json:
        print_json(document)
    else:
        show(found)
    if not found:
        raise ValueError(f"none of the {len(bad)} pictures could be read.")
    return 0


def named(places: list[str], videos: bool = False) -> Iterator[tuple[Path, str]]:
    """Every picture or video with a name for its files; two of the same name get numbers."""
    from saccade.data.decode.image import IMAGE_SUFFIXES
    from saccade.data.decode.video import VIDEO_SUFFIXES

    known = VIDEO_SUFFIXES if videos else IMAGE_SUFFIXES
    taken: dict[str, int] = {}
    for place in map(Path, places):
        if not place.exists():
            raise ValueError(f"no picture at {place}.")
        inside = sorted(p for p in place.rglob("*") if p.suffix.lower() in known) if place.is_dir() else [place]
        if not inside:
            raise ValueError(f"{place} holds no {'videos' if videos else 'pictures'}.")
        for path in inside:
            count = taken[path.stem] = taken.get(path.stem, 0) + 1
            yield path, path.stem if count == 1 else f"{path.stem}-{count}"


def classify(model: Any, card: Any, path: Path, name: str, args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """The most probable classes of a picture, or of a video in several views."""
    import torch

    from saccade.data.decode.image import read_image
    from saccade.data.decode.video import VideoFile
    from saccade.data.transforms.batch import normalize
    from saccade.engine.feed import straight_transform
    from saccade.tasks.video import average_views

    about = card.preprocess._replace(size=args.size or card.preprocess.size)
    views = tuple(args.views) if about.frames else (1, 1)
    pixels = straight_transform(about, views)(VideoFile(path) if about.frames else read_image(path))
    pixels = pixels if views != (1, 1) else pixels[None]
    with torch.inference_mode(), autocast(args, device):
        logits = model(normalize(pixels.to(device).float() / 255, about.mean, about.std))
    logits = average_views(logits[None])
    shares, numbers = logits.float().softmax(1)[0].topk(min(args.top, logits.shape[1]))
    names = card.names
    return {
        "classes": [
            {"class": number, "name": names[number], "share": share}
            for number, share in zip(numbers.tolist(), shares.tolist(), strict=True)
        ]
    }


def segment(model: Any, card: Any, path: Path, name: str, args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """A class for every pixel: label PNG, overlay PNG, and the area of every class."""
    import numpy as np
    import torch
    from PIL import Image

    from saccade.data.decode.image import read_image
    from saccade.data.sources.class_names import flipped_classes
    from saccade.engine.evaluate_masks import answer, look_at
    from saccade.tasks.inference import Inference, label
    from saccade.tasks.segments import areas, class_colours, label_image, overlay

    image = read_image(path)
    names = card.names
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(device)
    seen = look_at(pixels, card.preprocess, args.size or card.shorter)
    window = args.window
    if window is None:
        window = 0 if seen.shape[2] * seen.shape[3] <= LARGEST else max(512, -(-card.preprocess.size // 32) * 32)
    how = Inference(window, args.stride, tuple(args.scales), args.flip)
    with torch.inference_mode(), autocast(args, device):
        if seen.shape[2:] == pixels.shape[2:]:
            found = label(model, seen, how, flipped_classes(names))
        else:
            found = answer(model, seen, pixels.shape[2:], how, names).argmax(1)
    labels = found[0].byte().cpu().numpy()
    files = {}
    if args.out:
        colours, folder = class_colours(len(names)), Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"labels": f"{name}_labels.png", "overlay": f"{name}_overlay.png"}
        save(label_image(labels, colours), folder / files["labels"])
        save(Image.fromarray(overlay(np.asarray(image), labels, colours)), folder / files["overlay"])
    return {"size": [image.width, image.height], "classes": areas(labels, names), **files}


def detect(model: Any, card: Any, path: Path, name: str, args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Objects from --threshold on: name, score, box, mask as COCO's run lengths; drawn on the picture."""
    import numpy as np
    import torch

    from saccade.data.decode.image import read_image
    from saccade.tasks.coco import encode
    from saccade.tasks.detections import describe_detections, draw_detections

    image = read_image(path)
    if args.size:
        model.transform.min_size = (args.size,)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device)
    with torch.inference_mode(), autocast(args, device):
        answer = model([pixels.float() / 255])[0]
    answer = {key: value[answer["scores"] >= args.threshold] for key, value in answer.items()}
    objects = describe_detections(answer, card.classes)
    if "masks" in answer:
        codes = encode(answer["masks"][:, 0] >= 0.5)
        objects = [entry | {"segmentation": codes[entry["index"]]} for entry in objects]
    files = {}
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"overlay": f"{name}_objects.png"}
        save(draw_detections(image, answer, card.classes, args.threshold), folder / files["overlay"])
    for entry in objects:
        del entry["index"]
    return {"size": [image.width, image.height], "objects": objects, **files}


def autocast(args: argparse.Namespace, device: Any) -> Any:
    import torch

    enabled = args.precision != "float32"
    return torch.autocast(device.type, getattr(torch, args.precision) if enabled else None, enabled=enabled)


def save(image: Any, path: Path) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f".{path.name}")
    image.save(fresh, "PNG")
    fresh.replace(path)


def write_json(path: Path, document: Any) -> None:
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(json.dumps(document, indent=2) + "\n")
    fresh.replace(path)


def show(found: list[dict[str, Any]]) -> None:
    for entry in found:
        if "objects" in entry:
            kinds = Counter(one["name"] for one in entry["objects"])
            said = ", ".join(f"{count} {name}" for name, count in kinds.most_common()) or "nothing"
        else:
            said = ", ".join(f"{c['name']} {100 * c['share']:.1f} %" for c in entry["classes"])
        files = " ".join(entry[key] for key in ("labels", "overlay") if key in entry)
        print(f"{entry['image']}: {said}" + (f" → {files}" if files else ""))
