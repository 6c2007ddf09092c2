"""1000 requests leave nothing in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the API needs the web extra: pip install 'saccade[web]'")

from saccade.web import service as services
from tests.web.leak_requests import REQUESTS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_thousand_requests_leave_nothing_in_memory(tmp_path):
    command = [sys.executable, "-m", "tests.web.leak_requests", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert left["statuses"] == {"200": 700, "400": 200, "422": 100}
    assert left["results"] == services.MAX_CACHED
    assert sum(left["objects"].values()) < REQUESTS / 4, left["objects"]
    assert left["bytes"] < 100 * REQUESTS
    assert left["files"] == ["photos"]
