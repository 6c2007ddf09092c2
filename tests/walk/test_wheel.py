"""The wheel, installed into an empty folder and used from another working directory."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.weights.folder import load_tool, make_run, weights_in

ROOT = Path(__file__).parents[2]
NANO = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
pytest.importorskip("setuptools", minversion="77", reason="builds the wheel without a download")


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip installed the wheel into, and the wheel; it embeds weights of four nano models."""
    work = tmp_path_factory.mktemp("wheel")
    tree = work / "tree"
    tree.mkdir()
    for name in ("saccade", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    with weights_in(tree / "saccade/weights"):
        for name in NANO:
            load_tool().embed(make_run(work / name, name), "tiny_imagenet")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", tree, "--no-deps", "--no-build-isolation", "-w", work / "dist")
    (wheel,) = (work / "dist").glob("*.whl")
    run(*pip, "install", wheel, "--no-deps", "--no-index", "--target", work / "site")
    return work / "site", wheel


def run_installed(site, tmp_path, *arguments):
    """Run a command of the installed package in another folder."""
    paths = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    return run(sys.executable, "-m", "saccade.cli", *arguments, cwd=tmp_path, env=os.environ | paths)


@pytest.mark.slow
def test_wheel_contains_every_package_file(installed):
    with zipfile.ZipFile(installed[1]) as wheel:
        packed = set(wheel.namelist())
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "saccade").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and not name.endswith(".pyc")}
    assert not files - packed
    assert {f"saccade/weights/{name}.tiny_imagenet.{end}" for name in NANO for end in ("safetensors", "md")} <= packed


@pytest.mark.slow
def test_demo_runs_from_another_folder(installed, tmp_path):
    site, _ = installed
    location = run(
        sys.executable, "-c", "import saccade; print(saccade.__file__)",
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert location.startswith(str(site))
    assert "example: saccade demo" in run_installed(site, tmp_path, "demo", "--help")
    document = json.loads(run_installed(site, tmp_path, "demo", "--train-minutes", "0", "--device", "cpu", "--json"))
    assert [row["model"] for row in document["models"]] == list(NANO)
    assert all(row["trained"] and row["predictions"]["coffee"] for row in document["models"])
    assert (tmp_path / document["page"]).stat().st_size > 100_000


@pytest.mark.slow
def test_embedded_weights_predict_from_another_folder(installed, tmp_path):
    site, _ = installed
    photo = site / "saccade/data/synthetic/photos/cat.jpg"
    document = json.loads(run_installed(site, tmp_path, "predict", "svit_nano", photo, "--device", "cpu", "--json"))
    names = {row["name"] for row in document["predictions"][0]["classes"]}
    assert names == {"tabby", "espresso", "goldfish", "crane"}
