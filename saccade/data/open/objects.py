"""Images with objects at a path."""

import re
from functools import partial
from pathlib import Path

from saccade._extras import require
from saccade.data.open.splits import (
    EMBEDDED_IMAGES,
    EVAL_NAMES,
    TRAIN_NAMES,
    Opener,
    check_exists,
    embedded_splits,
    files_matching,
)
from saccade.data.sources.base import DataError, read_class_names
from saccade.data.sources.box_files import BoxFiles, parse_voc, parse_yolo, voc_pairs, yolo_pairs
from saccade.data.sources.coco import CocoSource, read_json
from saccade.data.sources.object_table import ObjectTable
from saccade.data.synthetic.scenes import SceneObjects


def find_object_splits(
    path: str | Path, image_column: str | None = None, scenes: int = 512, size: int = 128
) -> dict[str, Opener]:
    """Images with objects. `scenes` (number of training images) and `size` are for the embedded dataset."""
    if str(path) == EMBEDDED_IMAGES:
        return embedded_splits(SceneObjects, scenes, max(10, scenes // 8), size)
    path = Path(path)
    check_exists(path, "a COCO JSON file, a folder in the layout of COCO, YOLO or VOC, Parquet files", EMBEDDED_IMAGES)
    if path.suffix in (".yaml", ".yml"):
        return _yolo_yaml_splits(path)
    if path.is_file():
        return {"all": _object_opener(path, image_column)}
    for folder in (path / "annotations", path):
        files = sorted(folder.glob("*.json"))
        if files := [file for file in files if file.name.startswith("instances_")] or files:
            return {_coco_split_name(file.stem): _object_opener(file, image_column) for file in files}
    if files := sorted(path.glob("*/_annotations.coco.json")):  # Roboflow
        return {_coco_split_name(file.parent.name): _object_opener(file, image_column) for file in files}
    if splits := _yolo_splits(path) or _voc_splits(path):
        return splits
    groups: dict[str, list[str]] = {}
    for file in files_matching(path, "*.parquet"):
        groups.setdefault(_coco_split_name(re.split(r"[-.]", Path(file).name)[0]), []).append(file)
    if groups:
        return {name: partial(ObjectTable, files, image_column) for name, files in groups.items()}
    raise DataError(
        f"expected COCO annotations (annotations/instances_train.json), YOLO's images/ and labels/, VOC's JPEGImages/ "
        f"and Annotations/, or Parquet files in {path}."
    )


def _object_opener(file: Path, image_column: str | None) -> Opener:
    if file.suffix == ".parquet":
        return partial(ObjectTable, [file], image_column)
    if file.suffix != ".json":
        raise DataError(f"expected a COCO .json or a .parquet file, got {file}.")
    return partial(_open_coco, file)


def _open_coco(file: Path, classes: list[str] | None = None) -> CocoSource:
    return CocoSource(file, _coco_image_folder(file), classes)


def _coco_image_folder(file: Path) -> Path:
    """The folder with the images of an annotation file: named like the split, next to the file or one level up."""
    file_names = [entry["file_name"] for entry in read_json(file)["images"][:20]]
    if not file_names:
        raise DataError(f"{file} lists no images.")
    split = file.stem.removeprefix("instances_")
    names = dict.fromkeys((split, split.split("_")[0], _coco_split_name(split)))
    candidates = [
        root / folder
        for root in (file.parent.parent, file.parent)
        for folder in (*names, *(f"images/{name}" for name in names), "images", ".")
    ]
    for folder in candidates:
        if any((folder / name).is_file() for name in file_names):
            return folder
    raise DataError(
        f"cannot find the images of {file}: {file_names[0]} is neither in {candidates[0]} nor in {file.parent}."
    )


def _coco_split_name(text: str) -> str:
    """ "instances_train2017" -> "train"."""
    return re.sub(r"\d{4}$", "", text.removeprefix("instances_")).lower() or "all"


def _yolo_splits(path: Path) -> dict[str, Opener]:
    """data.yaml; images/train and labels/train; train/images and train/labels; or images and labels."""
    if (file := next((path / name for name in ("data.yaml", "data.yml") if (path / name).is_file()), None)) is not None:
        return _yolo_yaml_splits(file)
    names = read_class_names(path)
    folders = {"all": path / "images"}
    for name in TRAIN_NAMES + EVAL_NAMES:
        for folder in (path / "images" / name, path / name / "images"):
            if folder.is_dir():
                folders[name] = folder
    if len(folders) > 1:
        del folders["all"]
    pairs = {name: yolo_pairs(folder) for name, folder in folders.items() if folder.is_dir()}
    if not any(file.is_file() for files in pairs.values() for _, file in files):
        return {}
    return {name: partial(_open_yolo, files, names) for name, files in pairs.items()}


def _yolo_yaml_splits(file: Path) -> dict[str, Opener]:
    """Splits of a data.yaml with `names` and the image folders `train`, `val` and `test`."""
    yaml = require("yaml", "train")
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        names = config["names"]
        names = [names[key] for key in sorted(names)] if isinstance(names, dict) else list(names)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"expected a YOLO file with names, train and val, got {file}: {error!r}.") from error
    root = file.parent / str(config.get("path") or "")
    folders = {}
    for split in ("train", "val", "test"):
        if text := config.get(split):
            # Roboflow writes ../train/images for a folder beside the file
            candidates = [base / part for base in (root, file.parent) for part in (str(text), str(text).lstrip("./"))]
            folders[split] = next((folder for folder in candidates if folder.exists()), candidates[0])
    if missing := [str(folder) for folder in folders.values() if not folder.exists()] or not folders:
        raise DataError(f"expected the image folders of {file}, got none at {missing}.")
    return {split: partial(_open_yolo, yolo_pairs(folder), names) for split, folder in folders.items()}


def _open_yolo(pairs: list[tuple[Path, Path]], names: list[str] | None, classes: list[str] | None = None) -> BoxFiles:
    return BoxFiles(pairs, parse_yolo, dict(enumerate(names)) if names else None, True, classes)


def _voc_splits(path: Path) -> dict[str, Opener]:
    """JPEGImages and Annotations with ImageSets/Main, also one level down; or .xml beside the images of every split."""
    for root in (path, *sorted(path.glob("VOC*"))):
        images = next((root / name for name in ("JPEGImages", "images") if (root / name).is_dir()), None)
        if images is None or next((root / "Annotations").glob("*.xml"), None) is None:
            continue
        lists = {file.stem: file.read_text().split() for file in sorted((root / "ImageSets/Main").glob("*.txt"))}
        stems = {name: lists[name] for name in TRAIN_NAMES + EVAL_NAMES if name in lists} or {"all": None}
        return {name: partial(_open_voc, images, root / "Annotations", chosen) for name, chosen in stems.items()}
    folders = [name for name in TRAIN_NAMES + EVAL_NAMES if next((path / name).glob("*.xml"), None) is not None]
    return {name: partial(_open_voc, path / name, path / name, None) for name in folders}


def _open_voc(images: Path, annotations: Path, stems: list[str] | None, classes: list[str] | None = None) -> BoxFiles:
    return BoxFiles(voc_pairs(images, annotations, stems), parse_voc, classes=classes)
