"""`saccade predict`: run a checkpoint on images or videos.

Two kinds of output. Without flags of batch prediction: one prediction per file, printed as it comes. With `--format
parquet`, or a flag that needs it (BATCH_FLAGS): rows in Parquet files in `--out`, for any number of images.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from saccade._errors import UsageError
from saccade.cli import MAX_SIDE, integer, number
from saccade.cli.task_options import add_inference_arguments

HELP = "predict on images or videos: classes, segmentation maps or objects, drawn and as JSON or CSV"
EXAMPLE = "saccade predict runs/masks photo.jpg folder/ --out predictions"
FLAGS = ("out", "device")  # of the shared ones
BATCH_FLAGS = ("task", "engine", "tokens", "workers", "actors", "part_rows", "image_column")  # imply --format parquet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a .safetensors or .pth file, a run folder, the name of embedded weights, hf-hub:owner/name, or a .onnx "
        "file of `saccade export`, which needs no torch",
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="image or video files, URLs, or folders; with --format parquet also globs, Parquet and tar shards",
    )
    parser.add_argument(
        "--size", type=integer(1, MAX_SIDE), metavar="PX", help="input size (default: the checkpoint's)"
    )
    parser.add_argument(
        "--batch",
        type=integer(),
        metavar="N",
        help="images per forward pass (default: 16; with --format parquet 64, and 8 for segment and detect)",
    )
    parser.add_argument("--top", type=integer(), default=5, metavar="N", help="number of classes to list (default: 5)")
    parser.add_argument(
        "--views",
        type=integer(),
        nargs=2,
        default=(1, 1),
        metavar=("CLIPS", "CROPS"),
        help="views per video (papers: 4 3)",
    )
    parser.add_argument("--embed", action="store_true", help="write the features before the classifier to --out")
    parser.add_argument(
        "--every",
        type=number(0, exclusive=True),
        default=1.0,
        metavar="S",
        help="image models on videos: a frame every S seconds (1)",
    )
    parser.add_argument("--csv", action="store_true", help="print CSV: one row per class, class area or object")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    segmentation = add_inference_arguments(parser)
    segmentation.add_argument("--flip", action="store_true", help="average with the mirrored image")
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--threshold",
        type=number(0, 1),
        default=0.5,
        metavar="X",
        help="minimum score of a detection or label (default: 0.5)",
    )
    add_batch_arguments(parser)


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "batch prediction", "any of these flags writes Parquet files to --out; a run that was killed continues"
    )
    group.add_argument("--format", choices=("files", "parquet"), help="default: files, without the flags below")
    group.add_argument(
        "--task",
        choices=("classify", "embed", "segment", "detect"),
        help="columns to write (default: the model's task)",
    )
    group.add_argument("--engine", choices=("local", "ray"), help="this process (default), or Ray Data")
    group.add_argument("--tokens", action="store_true", help="add centre, area and norm of every token")
    group.add_argument(
        "--workers", type=integer(), metavar="N", help="decoding threads of --engine local (default: cores)"
    )
    group.add_argument("--actors", type=integer(), metavar="N", help="copies of the model with --engine ray")
    group.add_argument("--part-rows", type=integer(), metavar="N", help="rows per Parquet file (default: 4096)")
    group.add_argument("--image-column", metavar="NAME", help="column of Parquet sources with the images")


def needs_torch(args: argparse.Namespace) -> bool:
    return Path(args.checkpoint).suffix != ".onnx"


def run(args: argparse.Namespace) -> int:
    if args.csv and args.json:
        raise UsageError("--csv and --json exclude each other. Leave one out.")
    flags = [name for name in BATCH_FLAGS if getattr(args, name) not in (None, False)]
    if args.format == "files" and flags:
        raise UsageError(f"--{flags[0].replace('_', '-')} writes Parquet files. Remove it, or --format files.")
    if args.format == "parquet" or flags:
        return run_batch(args)
    if args.embed and not args.out:
        raise UsageError("expected --out DIR with --embed, which writes DIR/embeddings.npz.")
    if not needs_torch(args):
        return run_onnx(args)
    import torch

    import saccade
    from saccade._files import unique_stem
    from saccade.cli import check_source, pick_device

    check_source(args.checkpoint)
    model = saccade.load(args.checkpoint, device=pick_device(args.device))
    card: Any = model.card
    names = ("size", "top", "embed", "threshold", "window", "stride", "flip", "every")
    options: dict[str, Any] = {name: getattr(args, name) for name in names} | {
        "views": tuple(args.views),
        "scales": tuple(args.scales),
    }
    dtype = None if args.precision == "float32" else getattr(torch, args.precision)
    files = list_files(args.images, card.preprocess.frames > 0, args.every)
    stems: set[str] = set()
    embeddings: dict[str, Any] = {}

    def rows() -> Iterator[dict[str, Any]]:
        results = saccade.predict_stream(model, files, args.batch or 16, dtype=dtype, **options)
        for file, result in zip(files, results, strict=True):
            name = path_of(file)
            row = result.to_dict() | {"image": name}
            if not isinstance(result, saccade.Unreadable):
                stem = unique_stem(result.name, stems)
                if args.embed:
                    embeddings[name] = result.embedding  # type: ignore[attr-defined] # a Classification
                if args.out and card.task != "classification":
                    row |= result.save_images(args.out, stem)
            yield row

    code = report(args, card.task, rows(), len(files))
    if args.embed:
        write_embeddings(Path(args.out) / "embeddings.npz", embeddings)
    return code


def run_batch(args: argparse.Namespace) -> int:
    """Write Parquet files to --out, and print a summary."""
    import torch

    from saccade.cli import check_source, pick_device, print_json
    from saccade.inference import PART_ROWS, predict_batch

    if not args.out:
        raise UsageError("expected --out DIR with --format parquet.")
    if not needs_torch(args):
        raise UsageError(
            "--format parquet needs a checkpoint, got a .onnx file. Use the checkpoint, or --format files."
        )
    for flag, default, advice in (
        ("csv", False, "Read the Parquet files."),
        ("embed", False, "Use --task embed."),
        ("views", (1, 1), "Videos need --format files."),
        ("every", 1.0, "Videos need --format files."),
    ):
        if getattr(args, flag) != default:
            raise UsageError(f"--{flag} is for --format files. {advice}")
    engine = args.engine or "local"
    options: dict[str, Any] = {name: getattr(args, name) for name in ("size", "top", "threshold", "window", "stride")}
    device = pick_device(args.device) if engine == "local" else None if args.device == "auto" else args.device
    check_source(args.checkpoint)
    summary = predict_batch(
        args.checkpoint,
        args.images,
        args.out,
        task=args.task,
        engine=engine,
        batch_size=args.batch,
        workers=args.workers,
        actors=args.actors,
        device=device,
        dtype=None if args.precision == "float32" else getattr(torch, args.precision),
        tokens=args.tokens,
        image_column=args.image_column,
        part_rows=PART_ROWS if args.part_rows is None else args.part_rows,
        progress=not args.json and sys.stderr.isatty(),
        scales=tuple(args.scales),
        flip=args.flip,
        **options,
    )
    document = {"out": str(args.out), "engine": engine} | summary._asdict()
    document["images_per_second"] = summary.predicted / max(summary.seconds, 1e-9)
    if args.json:
        print_json(document)
    else:
        print(
            f"{args.out}: {summary.rows} rows, {summary.errors} with an error; {summary.predicted} predicted now in "
            f"{summary.seconds:.1f} s ({document['images_per_second']:.1f} images/s)"
        )
    return 0


def list_files(paths: list[str], videos: bool, every: float) -> list[Any]:
    """Files, URLs, and frames of videos for image models; a path that does not exist is an error."""
    from saccade.data import is_url, list_inputs

    for path in paths:
        if not is_url(path) and not Path(path).exists():
            raise ValueError(f"no such file or folder: {path}.")
    return list_inputs(paths, videos, every)


def path_of(source: Any) -> str:
    """The path of a file, with the time of a frame."""
    from saccade.data import VideoFrame

    if not isinstance(source, VideoFrame):
        return str(source)
    return f"{str(source.video.path).removesuffix(Path(source.video.path).name)}{source.name}"


def run_onnx(args: argparse.Namespace) -> int:
    """Predict with onnxruntime alone; torch is not imported."""
    from saccade.inference import OnnxModel

    if args.device not in ("auto", "cpu"):
        raise UsageError(f"a .onnx file runs on the CPU here, got --device {args.device}. Remove the flag.")
    if args.precision != "float32":
        raise UsageError(f"--precision {args.precision} is for checkpoints. Use `saccade export --dtype float16`.")
    defaults = {
        "window": None,
        "stride": 0,
        "scales": [1.0],
        "flip": False,
        "embed": False,
        "views": (1, 1),
        "every": 1.0,
        "batch": None,
    }
    for flag, default in defaults.items():
        if getattr(args, flag) != default:
            raise UsageError(f"--{flag} is for checkpoints, not for .onnx files. Remove the flag.")
    model = OnnxModel(args.checkpoint)
    if model.task != "classification" and args.top != 5:
        raise UsageError(f"top applies to classification, not to {model.task}. Remove it.")
    if model.task != "detection" and not model.multi_label and args.threshold != 0.5:
        raise UsageError(f"threshold applies to detection and multi-label models, not to {model.task}. Remove it.")
    if model.preparation["frames"]:
        raise UsageError(f"{args.checkpoint} is a video model. `saccade predict CHECKPOINT VIDEO` decodes videos.")
    from saccade.data import list_files

    files = [file for path in args.images for file in list_files(Path(path))]
    return report(args, model.task, onnx_rows(model, files, args), len(files))


def onnx_rows(model: Any, files: list[Path], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Predictions of an exported model; a segmenter writes its labels as PNG of class indices."""
    from saccade._files import unique_stem
    from saccade.data import BadImage, read_image
    from saccade.inference import class_areas

    stems: set[str] = set()
    for file in files:
        row: dict[str, Any] = {"image": str(file)}
        try:
            image = read_image(file)
        except BadImage as error:
            yield row | {"error": str(error)}
            continue
        if model.task == "classification":
            yield row | model.classify(image, args.top, args.size, args.threshold)
            continue
        row["size"] = [image.width, image.height]
        if model.task == "detection":
            yield row | {"objects": model.detect(image, args.threshold, args.size)}
            continue
        labels = model.segment(image, args.size)
        row["classes"] = class_areas(labels, model.classes)
        if args.out:
            path = Path(args.out) / f"{unique_stem(file.name, stems)}_labels.png"
            row["labels"] = write_label_image(labels, path)
        yield row


def write_label_image(labels: Any, path: Path) -> str:
    """Write atomically and return the file name."""
    from PIL import Image

    from saccade._files import replaced_file

    with replaced_file(path) as temporary:
        Image.fromarray(labels).save(temporary, "PNG")
    return path.name


def report(args: argparse.Namespace, task: str, rows: Iterable[dict[str, Any]], count: int) -> int:
    """Print predictions as they come, and write predictions.json into --out."""
    from saccade._files import write_json
    from saccade.cli import print_json

    predictions, unreadable = [], []
    if args.csv:
        print(",".join(CSV_COLUMNS[task]))
    for row in rows:
        if "error" in row:
            unreadable.append(row["error"])
            if count > 1:
                print(f"saccade predict: skipped {row['error']}", file=sys.stderr)
            continue
        predictions.append(row)
        if args.csv:
            print_csv(row, task)
        elif not args.json:
            print_prediction(row)
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
    if not predictions:
        raise ValueError(unreadable[0] if count == 1 else f"none of the {count} files could be read.")
    return 0


CSV_COLUMNS = {
    "classification": ("image", "class", "name", "probability"),
    "segmentation": ("image", "class", "name", "share"),
    "detection": ("image", "label", "name", "score", "x0", "y0", "x1", "y1"),
}


def print_csv(row: dict[str, Any], task: str) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    for entry in row["objects" if task == "detection" else "classes"]:
        flat = entry | {"image": row["image"]}
        if task == "detection":
            flat |= dict(zip(("x0", "y0", "x1", "y1"), entry["box"], strict=True))
        writer.writerow([flat[column] for column in CSV_COLUMNS[task]])


def print_prediction(row: dict[str, Any]) -> None:
    if "objects" in row:
        counts = Counter(detection["name"] for detection in row["objects"])
        text = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no objects"
    else:
        key = "share" if "size" in row else "probability"  # area of a segmented class, or classification
        text = ", ".join(f"{entry['name']} {100 * entry[key]:.1f} %" for entry in row["classes"])
        if isinstance(row.get("labels"), list):  # of a multi-label model; of an exported segmenter a file
            text = f"{', '.join(row['labels']) or 'no label'} ({text})"
    files = " ".join(row[key] for key in ("labels", "overlay") if isinstance(row.get(key), str))
    print(f"{row['image']}: {text}" + (f" → {files}" if files else ""))


def write_embeddings(path: Path, embeddings: dict[str, Any]) -> None:
    """Write the file names and their features (N, D) as one .npz file, atomically."""
    import numpy as np

    from saccade._files import replaced_file

    with replaced_file(path) as temporary:
        np.savez_compressed(
            temporary, images=np.array(list(embeddings)), embeddings=np.stack(list(embeddings.values()))
        )
