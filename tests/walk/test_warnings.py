"""`python -W error`: no warning escapes from saccade, or from a package in the way saccade uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.data.synthetic.photos import photo_paths

ROOT = Path(saccade.__file__).parents[1]
HELP = """
import contextlib, io
import saccade.cli as cli
for name in cli.COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main([name, "--help"])
"""


def run(*arguments: str, folder: Path) -> str:
    """The errors that Python prints; at exit, it prints warnings that are errors without failing."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_import_and_help_give_no_warnings(tmp_path):
    assert run("-c", HELP, folder=tmp_path) == ""


@pytest.mark.slow
def test_commands_give_no_warnings(tmp_path):
    photo = str(photo_paths()["astronaut"])
    train = "train --model svit_nano --data scenes --from-scratch --epochs 1 --limit 8 --batch 4 --size 64 --quiet"
    for command in (
        ["predict", "svit_nano", photo],
        ["explain", "--model", "svit_nano", photo, "--out", "explained"],
        ["export", "svit_nano", "--out", "model.onnx"],
        [*train.split(), "--device", "cpu", "--out", "run"],
        ["eval", "run", "--data", "scenes", "--limit", "8", "--device", "cpu"],
        ["bench", "svit_nano", "--size", "64", "--device", "cpu"],
        ["models"],
    ):
        assert "Warning" not in run("-m", "saccade.cli", *command, folder=tmp_path)
