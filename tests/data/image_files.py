"""Small image datasets on disk: class folders, Parquet files and WebDataset shards."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(value: int) -> bytes:
    """A PNG of one grey value, by which an image is recognised."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


def grey(source: Any, index: int) -> int:
    return source.read(index).getpixel((0, 0))[0]


def write_folder(root: Path, counts: dict[str, int], start: int = 0) -> Path:
    """root/<class>/<i>.png; image i of class number k has the value start + 10 k + i."""
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png(start + 10 * number + i))
    return root


def write_parquet(path: Path, labels: Any, names: Any = None, values: Any = None, column: str = "image") -> Path:
    """Hugging Face convention: struct {bytes, path}, and class names in the metadata."""
    values = range(len(labels)) if values is None else values
    images = pa.array(
        [{"bytes": png(value), "path": None} for value in values], pa.struct([("bytes", "binary"), ("path", "string")])
    )
    table = pa.table({column: images, "label": pa.array(labels)})
    if names:
        features = {column: {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)
    return path


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """samples: key -> {suffix: content}."""
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path
