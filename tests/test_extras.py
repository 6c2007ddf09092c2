"""File names that are not UTF-8."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade._extras import printable
from saccade._files import write_file, write_json
from saccade.data.decode.image import BadImage, read_image
from saccade.data.sources.folder import FolderSource
from saccade.explanation.explain import explain

NAME = os.fsdecode(b"caf\xe9.png")


@pytest.fixture
def image(tmp_path) -> Path:
    """An image with a name in Latin-1."""
    path = tmp_path / NAME
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path, "PNG")
    return path


def test_printable_names_the_bytes():
    assert printable(NAME) == r"caf\xe9.png"
    assert printable("café 猫.png") == "café 猫.png"


def test_folder_reads_names_and_classes_of_any_encoding(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xe9t\xe9")
    for parent in (folder, tmp_path / "b"):
        parent.mkdir()
        Image.new("RGB", (4, 4)).save(parent / NAME, "PNG")
    source = FolderSource(tmp_path)
    assert source.classes == ["b", r"\xe9t\xe9"]
    assert source.labels.tolist() == [0, 1]
    assert source.name(1) == rf"{tmp_path}/\xe9t\xe9/caf\xe9.png"
    assert source.read(1).size == (4, 4)
    (folder / NAME).write_bytes(b"")
    with pytest.raises(BadImage) as error:
        source.read(1)
    json.dumps(str(error.value)).encode()
    str(error.value).encode()


def test_missing_file_is_named_in_text(tmp_path):
    with pytest.raises(BadImage, match=r"caf\\xe9\.png") as error:
        read_image(tmp_path / NAME)
    str(error.value).encode()


def test_text_files_are_written(tmp_path):
    write_file(tmp_path / "a.html", f"<p>{NAME}</p>")
    write_json(tmp_path / "a.json", {"name": NAME})
    write_file(tmp_path / "b.html", NAME)
    assert "caf" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "caf" in (tmp_path / "b.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["name"] == NAME


def test_explanation_of_the_file_is_written(image, tmp_path):
    explain(image, "svit_nano", importance=(), out=tmp_path / "out")
    assert r"caf\xe9.png" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out/explanation.json").read_text())


def test_command_line_prints_the_name(image):
    command = [sys.executable, "-m", "saccade.cli", "predict", "svit_nano.tiny_imagenet", str(image) + "absent"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"})
    assert done.returncode == 1
    assert b"caf" in done.stderr
    assert b"Traceback" not in done.stderr
