"""The targets: how an input is read, which errors may be raised, and the seeds that are mutated."""

import io
import json
import os
import pickletools
import random
import struct
import tarfile
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from saccade.data.decode.image import BadImage, read_image, read_mask_values
from saccade.data.decode.video import VideoFile, write_video
from saccade.data.sources.base import DataError, check_labels
from saccade.data.sources.coco import CocoSource
from saccade.data.sources.shards import ShardSource
from saccade.data.sources.table import TableSource, encoded_cell
from saccade.engine.recipe import RecipeError, load_recipe
from saccade.models.card import read_card
from saccade.models.checkpoint import match_checkpoint
from saccade.web.uploads import BadUpload, Limits, read_upload, read_video
from saccade.weights.read import CheckpointError
from tests.fuzz.mutate import WORDS, mutate, mutate_json, mutate_tar


class Target(NamedTuple):
    """One kind of file."""

    run: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]  # the only ones that may be raised
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, random.Random, list[bytes]], bytes] = mutate


@lru_cache(maxsize=1)
def folder() -> Path:
    """A folder in memory where possible, for readers that take a path."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return Path(tempfile.mkdtemp(prefix="saccade-fuzz-", dir=parent))


def written(data: bytes, name: str) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


# Images


@lru_cache(maxsize=1)
def image_seeds() -> list[bytes]:
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    grey16 = Image.fromarray(rng.integers(0, 65536, (9, 12)).astype(np.uint16))
    palette = rgb.quantize(8)
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [rgb, rgb.rotate(90), rgb.rotate(180)]
    variants: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (rgb, "PNG", {}),
        (rgb.convert("RGBA"), "PNG", {}),
        (palette, "PNG", {"transparency": 0}),
        (grey16, "PNG", {}),
        (rgb.convert("1"), "PNG", {}),
        (rgb, "JPEG", {"exif": exif}),
        (rgb, "JPEG", {"progressive": True, "quality": 30}),
        (rgb.convert("CMYK"), "JPEG", {}),
        (rgb.convert("L"), "JPEG", {}),
        (rgb, "WEBP", {}),
        (rgb.convert("RGBA"), "WEBP", {"lossless": True}),
        (rgb, "WEBP", {"save_all": True, "append_images": frames[1:]}),
        (rgb, "BMP", {}),
        (palette, "BMP", {}),
        (palette, "GIF", {}),
        (rgb, "GIF", {"save_all": True, "append_images": frames[1:], "disposal": 2}),
        (rgb, "TIFF", {}),
        (rgb, "TIFF", {"compression": "tiff_lzw"}),
        (rgb, "TIFF", {"compression": "jpeg"}),
        (rgb.convert("F"), "TIFF", {"compression": "tiff_deflate"}),
        (rgb.convert("1"), "TIFF", {"compression": "group4"}),
        (rgb, "PPM", {}),
        (rgb.convert("L"), "PPM", {}),
        (rgb, "JPEG2000", {}),
        (rgb, "AVIF", {}),
    ]
    seeds = []
    for image, kind, options in variants:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        seeds.append(stream.getvalue())
    return seeds


def run_image(data: bytes) -> None:
    kind = sum(data[:64]) % 4
    if kind == 0:
        read_mask_values(data, "mask")
    else:
        image = read_image(data, "image", max_side=64 if kind == 1 else None)
        assert image.mode == "RGB"


# Checkpoints


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)


@lru_cache(maxsize=1)
def tiny() -> Tiny:
    return Tiny()


@lru_cache(maxsize=1)
def checkpoint_seeds() -> list[bytes]:
    from safetensors.torch import save

    state = {key: value.detach() for key, value in tiny().state_dict().items()}
    seeds = [save(state), save(state, {"format": "pt"}), save({"fc.weight": torch.zeros(2, 3, dtype=torch.float16)})]
    wrapped = {"model": {f"module.{key}": value for key, value in state.items()}, "args": Namespace(lr=0.1), "epoch": 3}
    for document in (state, wrapped, {"state_dict_ema": state}):
        for zipped in (True, False):
            stream = io.BytesIO()
            torch.save(document, stream, _use_new_zipfile_serialization=zipped)
            seeds.append(stream.getvalue())
    with zipfile.ZipFile(io.BytesIO(seeds[3])) as archive:  # the pickle alone; `run_checkpoint` adds the rest
        seeds.append(PICKLE + archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl"))))
    seeds.append(PICKLE + b"\x80\x02cbuiltins\nbytearray\nq\x00J\xff\xff\xff\x7f\x85q\x01Rq\x02.")
    seeds.append(PICKLE + b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00(NK\x00NNNNtq\x01Rq\x02.")
    return seeds


PICKLE = b"PKL:"
NAMES = ["collections OrderedDict", "torch FloatStorage", "torch._utils _rebuild_tensor_v2", "torch Size", "os system",
         "torch._utils _rebuild_parameter", "torch device", "builtins bytearray", "builtins set", "argparse Namespace",
         "torch.serialization _get_layout", "torch._tensor _rebuild_from_type_v2"]  # fmt: skip
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
CHECKPOINT_WORDS = OPCODES + [f"c{name}\n".replace(" ", "\n").encode() for name in NAMES]


def run_checkpoint(data: bytes) -> None:
    if data.startswith(PICKLE):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", data[len(PICKLE) :])
            archive.writestr("archive/byteorder", "little")
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/data/0", bytes(24))
            archive.writestr("archive/data/1", bytes(8))
        data = stream.getvalue()
    is_torch = data[:2] == b"PK" or data[:2] == b"\x80\x02"
    match_checkpoint(tiny(), written(data, "weights.pth" if is_torch else "weights.safetensors"))


# Model cards


CARD_SEEDS = [
    {
        "saccade.model": "svit_nano",
        "saccade.num_classes": "10",
        "saccade.kwargs": '{"dims": [8, 16], "super_token": [2, 1]}',
        "saccade.classes": '["cat", "dog"]',
        "saccade.preprocess": '{"size": 64, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "crop_pct": 1.0}',
        "saccade.task": "classification",
    },
    {
        "saccade.model": "paca_nano",
        "saccade.head": "paca",
        "saccade.head_kwargs": '{"dim": 64}',
        "saccade.task": "segmentation",
        "saccade.shorter": "360",
    },
    {
        "architecture": "svit_nano",
        "num_classes": 3,
        "model_args": {"img_size": 64},
        "label_names": ["a", "b", "c"],
        "pretrained_cfg": {"input_size": [3, 64, 64], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    },
]


def mutate_card(seed: bytes, rng: random.Random, seeds: list[bytes]) -> bytes:
    """A change of the document, or of a JSON text inside it."""
    if rng.random() < 0.2:
        return mutate(seed, rng, seeds)
    document = json.loads(seed)
    texts = [key for key, value in document.items() if isinstance(value, str) and value[:1] in "[{"]
    if texts and rng.random() < 0.5:
        key = rng.choice(texts)
        inner = document[key].encode()
        changed = mutate_json(inner, rng) if rng.random() < 0.7 else mutate(inner, rng)
        document[key] = changed.decode("latin-1")
        return json.dumps(document).encode()
    return mutate_json(seed, rng)


def run_card(data: bytes) -> None:
    config, file = folder() / "config.json", "card.safetensors"
    is_timm = b"architecture" in data
    try:
        document = {} if is_timm else json.loads(data)
    except (ValueError, RecursionError):
        document = data.decode("latin-1")
    header = {"__metadata__": document} if isinstance(document, dict) else document
    tensor = {"fc.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header | tensor if isinstance(header, dict) else header).encode()
    path = written(struct.pack("<Q", len(text)) + text + bytes(8), file)
    config.unlink(missing_ok=True)
    if is_timm:
        config.write_bytes(data)
    elif not isinstance(document, dict) or "saccade.model" not in document:
        return  # identified by its tensors: the checkpoint target
    read_card(path)


# COCO annotations


@lru_cache(maxsize=1)
def coco_seeds() -> list[bytes]:
    import pycocotools.mask as coco

    Image.new("RGB", (8, 8)).save(folder() / "image.png")
    mask = np.zeros((8, 8), np.uint8)
    mask[2:6, 1:7] = 1
    document = {
        "images": [{"id": 1, "file_name": "image.png", "width": 8, "height": 8}],
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
    }
    segmentations: list[Any] = [
        [[1, 1, 6, 1, 6, 6, 1, 6]],
        {"size": [8, 8], "counts": [9, 6, 2, 6, 41]},
        {"size": [8, 8], "counts": coco.encode(np.asfortranarray(mask))["counts"].decode()},
    ]
    annotations = [
        {
            "id": i + 1,
            "image_id": 1,
            "category_id": 3,
            "bbox": [1, 1, 5, 5],
            "iscrowd": 0,
            "area": 25,
            "segmentation": segmentation,
        }
        for i, segmentation in enumerate(segmentations)
    ]
    documents = [document | {"annotations": annotations}]
    documents += [document | {"annotations": [{**annotation, "area": None}]} for annotation in annotations]
    for each in documents[1:]:
        del each["annotations"][0]["area"]
    return [json.dumps(each).encode() for each in documents]


def mutate_coco(seed: bytes, rng: random.Random, seeds: list[bytes]) -> bytes:
    return mutate(seed, rng, seeds) if rng.random() < 0.2 else mutate_json(seed, rng)


def run_coco(data: bytes) -> None:
    source = CocoSource(written(data, "annotations.json"), folder())
    for index in range(len(source)):
        source.objects(index, source.read(index).size)
    source.ground_truth()


# Parquet


@lru_cache(maxsize=1)
def parquet_seeds() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = image_seeds()
    rows = {
        "image": [{"bytes": images[0], "path": "a.png"}, {"bytes": None, "path": "image.png"}],
        "label": [0, 1],
    }
    stream = io.BytesIO()
    pq.write_table(pa.table(rows), stream, compression="none")
    return [
        *images[:3],
        images[5],
        b"image.png",
        b"../image.png",
        b"/dev/zero",
        b"file:///etc/passwd",
        stream.getvalue(),
    ]


def run_parquet(data: bytes) -> None:
    import pyarrow as pa

    if data[:4] == b"PAR1":
        source = TableSource([written(data, "table.parquet")])
        for index in range(min(len(source), 4)):
            source.read(index)
        check_labels(source, "validation")
        return
    cell = pa.scalar({"bytes": data, "path": None}, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if len(data) < 40:  # a path
        text = data.decode("utf-8", "replace")
        cell = pa.scalar({"bytes": None, "path": text}, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    read_image(encoded_cell(cell, "row 0", str(folder() / "table.parquet")), "row 0")


# Tar shards


@lru_cache(maxsize=1)
def tar_seeds() -> list[bytes]:
    seeds = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
            name = "a" * 120 if kind == tarfile.GNU_FORMAT else "é" * 40 if kind == tarfile.PAX_FORMAT else "a"
            for suffix, content in (("png", image_seeds()[0]), ("cls", b"3"), ("json", b'{"label": 3}')):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        seeds.append(stream.getvalue()[:6144])
    return seeds


def mutate_shard(seed: bytes, rng: random.Random, seeds: list[bytes]) -> bytes:
    return mutate(seed, rng, seeds) if rng.random() < 0.2 else mutate_tar(seed, rng)


def run_tar(data: bytes) -> None:
    source = ShardSource([written(data, "shard.tar")])
    for index in range(min(len(source), 3)):
        source.read(index)
    check_labels(source, "validation")


# Videos


@lru_cache(maxsize=1)
def video_seeds() -> list[bytes]:
    import av

    pixels = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    path = folder() / "seed.mp4"
    write_video(path, pixels)
    seeds = [path.read_bytes()]
    for kind, codec, form in (("avi", "mpeg4", "yuv420p"), ("matroska", "mjpeg", "yuvj420p"), ("gif", "gif", "rgb8")):
        stream = io.BytesIO()
        with av.open(stream, "w", format=kind) as container:
            output = container.add_stream(codec, rate=8)
            output.width, output.height, output.pix_fmt = 16, 16, form
            for frame in pixels:
                container.mux(output.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=form)))
            container.mux(output.encode())
        seeds.append(stream.getvalue())
    return seeds


VIDEO_WORDS = [b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"moov", b"mdat"]


def run_video(data: bytes) -> None:
    video = VideoFile(written(data, "clip.mp4"))
    list(video.frames([0, len(video) // 2]))


# Recipes


@lru_cache(maxsize=1)
def recipe_seeds() -> list[bytes]:
    return [
        b"task: classification\nmodel:\n  name: svit_nano\ndata:\n  path: scenes\nepochs: 2\noptimizer: {lr: 1e-3}\n",
        b"model: {name: paca_nano, kwargs: {clusters: [4]}}\naugment: {mixup: 0.8, scale: [0.5, 1.0]}\nbatch_size: 8\n",
        b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\nmodel: {kwargs: {x: *b}}\n",
        json.dumps({"model": {"name": "svit_nano"}, "schedule": {"name": "step", "milestones": [1, 2]}}).encode(),
    ]


def mutate_recipe(seed: bytes, rng: random.Random, seeds: list[bytes]) -> bytes:
    if seed[:1] == b"{" and rng.random() < 0.7:
        return mutate_json(seed, rng)
    return mutate(seed, rng, seeds, WORDS)


def run_recipe(data: bytes) -> None:
    load_recipe(written(data, "recipe.yaml"))


# Uploads


def upload_seeds() -> list[bytes]:
    return image_seeds() + video_seeds()[:1]


def run_upload(data: bytes) -> None:
    path = written(data, "upload")
    limits = Limits(megabytes=0.1, megapixels=4)
    if data[4:8] == b"ftyp" and b"avif" not in data[:32]:
        read_video(path, limits)
    else:
        assert max(read_upload(path, limits).size) <= 4096


def with_words(words: list[bytes]) -> Callable[..., bytes]:
    return partial(_mutate_with, words)


def _mutate_with(words: list[bytes], seed: bytes, rng: random.Random, seeds: list[bytes]) -> bytes:
    return mutate(seed, rng, seeds, words)


TARGETS = {
    "image": Target(run_image, (BadImage,), image_seeds),
    "checkpoint": Target(run_checkpoint, (CheckpointError,), checkpoint_seeds, with_words(CHECKPOINT_WORDS)),
    "card": Target(
        run_card, (CheckpointError,), lambda: [json.dumps(each).encode() for each in CARD_SEEDS], mutate_card
    ),
    "coco": Target(run_coco, (DataError, BadImage), coco_seeds, mutate_coco),
    "parquet": Target(run_parquet, (DataError, BadImage), parquet_seeds),
    "tar": Target(run_tar, (DataError, BadImage), tar_seeds, mutate_shard),
    "video": Target(run_video, (BadImage,), video_seeds, with_words(VIDEO_WORDS)),
    "recipe": Target(run_recipe, (RecipeError,), recipe_seeds, mutate_recipe),
    "upload": Target(run_upload, (BadUpload,), upload_seeds),
}
