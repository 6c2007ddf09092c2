"""`saccade predict`: run a checkpoint on images or videos.

Each task is one function (model, card, path, name, args, device) -> prediction as a dict; it writes its files to --out.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from saccade.cli.task_options import SEGMENTATION, Options, add_inference_arguments, check_options

HELP = "predict on images or videos: classes, segmentation maps or objects, drawn and as JSON"
EXAMPLE = "saccade predict runs/masks photo.jpg folder/ --out predictions"
MAX_PIXELS = 2_000_000  # larger images are segmented in windows unless --window is given
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
        help="a .safetensors or .pth file, a run folder, the name of embedded weights, or a .onnx file of `saccade "
        "export`, which needs no torch",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image or video files, or folders of them")
    parser.add_argument("--size", type=int, metavar="PX", help="input size (default: the checkpoint's)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="number of classes to list (default: 5)")
    parser.add_argument(
        "--views", type=int, nargs=2, default=(1, 1), metavar=("CLIPS", "CROPS"), help="views per video (papers: 4 3)"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    segmentation = add_inference_arguments(parser)
    segmentation.add_argument("--flip", action="store_true", help="average with the horizontally flipped image")
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--threshold", type=float, default=0.5, metavar="X", help="minimum score of a detection (default: 0.5)"
    )


def needs_torch(args: argparse.Namespace) -> bool:
    return Path(args.checkpoint).suffix != ".onnx"


def run(args: argparse.Namespace) -> int:
    if not needs_torch(args):
        return run_onnx(args)
    import torch

    from saccade.cli import pick_device
    from saccade.tasks.open import open_task_model

    device = torch.device(pick_device(args.device))
    model, card = open_task_model(args.checkpoint)
    check_options(args, card.task, OPTIONS)
    predict = {"classification": predict_classes, "segmentation": predict_segmentation, "detection": predict_objects}[
        card.task
    ]
    model.to(device)
    files = named_files(args.images, videos=card.preprocess.frames > 0)
    return report(args, card.task, files, lambda path, name: predict(model, card, path, name, args, device))


def run_onnx(args: argparse.Namespace) -> int:
    """Predict with onnxruntime alone; torch is not imported."""
    from saccade.inference.onnx_predict import OnnxModel

    if args.device not in ("auto", "cpu"):
        raise ValueError(f"a .onnx file runs on the CPU here, got --device {args.device}. Remove the flag.")
    if args.precision != "float32":
        raise ValueError(f"--precision {args.precision} is for checkpoints. Use `saccade export --dtype float16`.")
    model = OnnxModel(args.checkpoint)
    check_options(args, model.task, OPTIONS)
    for flag in ("window", "stride", "scales", "flip"):
        given = getattr(args, flag)
        if (tuple(given) if isinstance(given, list) else given) != (SEGMENTATION | OPTIONS)[flag][1]:
            raise ValueError(f"--{flag} is for checkpoints, not for .onnx files. Remove the flag.")
    if model.preparation["frames"]:
        raise ValueError(f"{args.checkpoint} is a video model. `saccade predict CHECKPOINT VIDEO` decodes videos.")
    return report(args, model.task, named_files(args.images), lambda path, name: predict_onnx(model, path, name, args))


def predict_onnx(model: Any, path: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the prediction of an exported model; a segmenter writes its labels as PNG of class indices."""
    from saccade.data.decode.image import read_image
    from saccade.inference.onnx_predict import class_areas

    image = read_image(path)
    if model.task == "classification":
        return model.classify(image, args.top, args.size)
    size = {"size": [image.width, image.height]}
    if model.task == "detection":
        return size | {"objects": model.detect(image, args.threshold, args.size)}
    labels = model.segment(image, args.size)
    files = {}
    if args.out:
        from PIL import Image

        Path(args.out).mkdir(parents=True, exist_ok=True)
        files = {"labels": f"{name}_labels.png"}
        save(Image.fromarray(labels), Path(args.out) / files["labels"])
    return size | {"classes": class_areas(labels, model.classes)} | files


def report(
    args: argparse.Namespace,
    task: str,
    files: Iterable[tuple[Path, str]],
    predict: Callable[[Path, str], dict[str, Any]],
) -> int:
    """Predict every file, skip unreadable ones, and print and write the predictions."""
    import sys

    from saccade.cli import print_json
    from saccade.data.decode.image import BadImage

    predictions, unreadable = [], []
    for path, name in files:
        try:
            predictions.append({"image": str(path)} | predict(path, name))
        except BadImage as error:
            unreadable.append(str(error))
            print(f"saccade predict: skipped {error}", file=sys.stderr)
    document = {
        "checkpoint": str(args.checkpoint),
        "task": task,
        "predictions": predictions,
        "unreadable": unreadable,
    }
    if args.out:
        write_json(Path(args.out) / "predictions.json", document)
    if args.json:
        print_json(document)
    else:
        print_predictions(predictions)
    if not predictions:
        raise ValueError(f"none of the {len(unreadable)} files could be read.")
    return 0


def named_files(paths: list[str], videos: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield every image or video with a unique stem for its output files."""
    from saccade.data.decode.image import IMAGE_SUFFIXES
    from saccade.data.decode.video import VIDEO_SUFFIXES

    suffixes = VIDEO_SUFFIXES if videos else IMAGE_SUFFIXES
    counts: Counter[str] = Counter()
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}.")
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} contains no {'videos' if videos else 'images'}.")
        for file in files:
            counts[file.stem] += 1
            yield file, file.stem if counts[file.stem] == 1 else f"{file.stem}-{counts[file.stem]}"


def predict_classes(
    model: Any, card: Any, path: Path, name: str, args: argparse.Namespace, device: Any
) -> dict[str, Any]:
    """Return the most probable classes of an image, or of a video averaged over views."""
    import torch

    from saccade.data.decode.image import read_image
    from saccade.data.decode.video import VideoFile
    from saccade.data.transforms.batch import normalize
    from saccade.engine.loaders import make_eval_transform
    from saccade.tasks.video import average_views

    preprocess = card.preprocess._replace(size=args.size or card.preprocess.size)
    views = tuple(args.views) if preprocess.frames else (1, 1)
    pixels = make_eval_transform(preprocess, views)(VideoFile(path) if preprocess.frames else read_image(path))
    pixels = pixels if views != (1, 1) else pixels[None]
    with torch.inference_mode(), autocast(args, device):
        logits = model(normalize(pixels.to(device).float() / 255, preprocess.mean, preprocess.std))
    logits = average_views(logits[None])
    probabilities, indices = logits.float().softmax(1)[0].topk(min(args.top, logits.shape[1]))
    return {
        "classes": [
            {"class": index, "name": card.names[index], "probability": probability}
            for index, probability in zip(indices.tolist(), probabilities.tolist(), strict=True)
        ]
    }


def predict_segmentation(
    model: Any, card: Any, path: Path, name: str, args: argparse.Namespace, device: Any
) -> dict[str, Any]:
    """Return the area of every class; write a label PNG and an overlay PNG."""
    import numpy as np
    import torch
    from PIL import Image

    from saccade.data.decode.image import read_image
    from saccade.data.sources.class_names import flipped_classes
    from saccade.engine.tasks.evaluate_segmenter import predict_batch, preprocess_images
    from saccade.tasks.segmentation_drawing import class_areas, class_colours, overlay_labels, palette_image
    from saccade.tasks.segmentation_inference import InferenceOptions, predict_labels

    image = read_image(path)
    names = card.names
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(device)
    inputs = preprocess_images(pixels, card.preprocess, args.size or card.shorter)
    window = args.window
    if window is None:
        window = 0 if inputs.shape[2] * inputs.shape[3] <= MAX_PIXELS else max(512, -(-card.preprocess.size // 32) * 32)
    inference = InferenceOptions(window, args.stride, tuple(args.scales), args.flip)
    with torch.inference_mode(), autocast(args, device):
        if inputs.shape[2:] == pixels.shape[2:]:
            label_map = predict_labels(model, inputs, inference, flipped_classes(names))
        else:
            label_map = predict_batch(model, inputs, pixels.shape[2:], inference, names).argmax(1)
    labels = label_map[0].byte().cpu().numpy()
    files = {}
    if args.out:
        colours, folder = class_colours(len(names)), Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"labels": f"{name}_labels.png", "overlay": f"{name}_overlay.png"}
        save(palette_image(labels, colours), folder / files["labels"])
        save(Image.fromarray(overlay_labels(np.asarray(image), labels, colours)), folder / files["overlay"])
    return {"size": [image.width, image.height], "classes": class_areas(labels, names), **files}


def predict_objects(
    model: Any, card: Any, path: Path, name: str, args: argparse.Namespace, device: Any
) -> dict[str, Any]:
    """Return objects with a score of at least --threshold: name, score, box, mask in COCO RLE; write an overlay PNG."""
    import numpy as np
    import torch

    from saccade.data.decode.image import read_image
    from saccade.tasks.coco_metric import encode_masks
    from saccade.tasks.detection_drawing import describe_detections, draw_detections

    image = read_image(path)
    if args.size:
        model.transform.min_size = (args.size,)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device)
    with torch.inference_mode(), autocast(args, device):
        detections = model([pixels.float() / 255])[0]
    detections = {key: value[detections["scores"] >= args.threshold] for key, value in detections.items()}
    objects = describe_detections(detections, card.classes)
    if "masks" in detections:
        codes = encode_masks(detections["masks"][:, 0] >= 0.5)
        objects = [entry | {"segmentation": codes[entry["index"]]} for entry in objects]
    files = {}
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"overlay": f"{name}_objects.png"}
        save(draw_detections(image, detections, card.classes, args.threshold), folder / files["overlay"])
    for entry in objects:
        del entry["index"]
    return {"size": [image.width, image.height], "objects": objects, **files}


def autocast(args: argparse.Namespace, device: Any) -> Any:
    import torch

    enabled = args.precision != "float32"
    return torch.autocast(device.type, getattr(torch, args.precision) if enabled else None, enabled=enabled)


def save(image: Any, path: Path) -> None:
    """Write atomically."""
    temporary = path.with_name(f".{path.name}")
    image.save(temporary, "PNG")
    temporary.replace(path)


def write_json(path: Path, document: Any) -> None:
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    temporary.replace(path)


def print_predictions(predictions: list[dict[str, Any]]) -> None:
    for entry in predictions:
        if "objects" in entry:
            counts = Counter(detection["name"] for detection in entry["objects"])
            text = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no objects"
        else:
            key = "share" if "size" in entry else "probability"  # area of a segmented class, or classification
            text = ", ".join(f"{row['name']} {100 * row[key]:.1f} %" for row in entry["classes"])
        files = " ".join(entry[key] for key in ("labels", "overlay") if key in entry)
        print(f"{entry['image']}: {text}" + (f" → {files}" if files else ""))
