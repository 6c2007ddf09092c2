"""A thousand files, of which a hundred are damaged or unusual: a row for each, in flat memory."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.peak_memory import PEAK

KINDS = ("truncated", "empty", "text", "huge", "cmyk", "animated", "grey16", "cut_png", "missing", "alpha")
BAD = {"truncated", "empty", "text", "huge", "cut_png", "missing"}

RUN = (
    PEAK
    + r"""
import json, sys
import torch
import saccade
from saccade.inference.batch import predict_batch
torch.set_num_threads(1)
torch.manual_seed(0)
model = saccade.create_model("vt_nano", num_classes=4).eval()
summary = predict_batch(model, sys.argv[1], sys.argv[2], part_rows=100, batch_size=16, workers=2, size=32)
print(json.dumps(summary._asdict() | {"peak_kb": peak()}))
"""
)


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def huge_png() -> bytes:
    """A valid header of 30,000 x 30,000 pixels and few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def odd_file(kind: str, pixels: np.ndarray) -> tuple[str, bytes | None]:
    """Suffix and content; None for a link to a file that is gone."""
    image = Image.fromarray(pixels)
    if kind == "truncated":
        content = encode(image, "JPEG", quality=95)
        return ".jpg", content[: len(content) // 2]
    if kind == "cut_png":
        return ".png", encode(image, "PNG")[:90]
    if kind == "cmyk":
        return ".jpg", encode(image.convert("CMYK"), "JPEG")
    if kind == "animated":
        return ".gif", encode(image, "GIF", save_all=True, append_images=[image.rotate(90), image.rotate(180)])
    if kind == "grey16":
        return ".png", encode(Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "PNG")
    if kind == "alpha":
        return ".png", encode(image.convert("RGBA"), "PNG")
    return ".jpg", {"empty": b"", "text": b"this is no image", "huge": huge_png(), "missing": None}[kind]


def write_files(folder, count: int) -> dict[str, str]:
    """Every tenth file is odd, the kinds in turn; returns the kind of each name."""
    folder.mkdir()
    rng, kinds = np.random.default_rng(0), {}
    for i in range(count):
        pixels = rng.integers(0, 256, (80, 96, 3), np.uint8)
        kind = KINDS[i // 10 % len(KINDS)] if i % 10 == 7 else "good"
        suffix, content = (
            (".jpg", encode(Image.fromarray(pixels), "JPEG")) if kind == "good" else odd_file(kind, pixels)
        )
        path = folder / f"{i:04d}{suffix}"
        kinds[path.name] = kind
        if content is None:
            path.symlink_to(folder / "gone")
        else:
            path.write_bytes(content)
    return kinds


def run(folder, out) -> dict:
    command = [sys.executable, "-c", RUN, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(folder, out, kinds) -> dict:
    summary = run(folder, out)
    rows = pq.read_table(out).to_pylist()
    assert sorted(os.path.basename(row["name"]) for row in rows) == sorted(kinds)
    for row in rows:
        kind = kinds[os.path.basename(row["name"])]
        assert (row["error"] is not None) == (kind in BAD), (kind, row["error"])
        if row["error"] is not None:
            assert row["error"].startswith(row["name"])
            assert "\n" not in row["error"]
    reasons = {kinds[os.path.basename(row["name"])]: row["error"] for row in rows if row["error"]}
    assert "empty" in reasons["empty"]
    assert "not a readable image" in reasons["text"]
    assert "900" in reasons["huge"]  # megapixels
    assert "no such file" in reasons["missing"]
    assert summary["rows"] == len(kinds)
    assert summary["errors"] == sum(kind in BAD for kind in kinds.values())
    return summary


@pytest.mark.slow
def test_thousand_files_with_a_hundred_odd_ones_have_a_thousand_rows_in_flat_memory(tmp_path):
    small = check(tmp_path / "small", tmp_path / "small_out", write_files(tmp_path / "small", 200))
    large = check(tmp_path / "large", tmp_path / "large_out", write_files(tmp_path / "large", 1000))
    print(f"200 files: {small}; 1000 files: {large}")  # shown by -rP
    assert (large["rows"], large["errors"]) == (1000, 60)
    assert large["peak_kb"] < small["peak_kb"] + 64 * 1024
