"""Hostile and valid uploads, mixed; `python -m tests.web.hostile_uploads --uploads 10000` is the long version."""

from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
from tests.web.hostile_uploads import is_good, run


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads memory from /proc")
def test_thousand_hostile_and_valid_uploads_leave_no_trace(tmp_path):
    result = run(1000, 1, tmp_path)
    assert is_good(result), result
    assert result["valid"] > 200
    assert result["rejected"] > 300
