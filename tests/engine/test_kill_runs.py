"""Runs killed at random moments; `python -m tests.engine.kill_runs --kills 100` is the long version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the training process")
def test_runs_killed_at_random_moments_end_with_the_same_weights():
    command = [sys.executable, "-m", "tests.engine.kill_runs", "--kills", "3", "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["equal"] == 3
