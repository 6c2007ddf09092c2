import pytest

from tests.explanation.scores.folders import write_folders


@pytest.fixture
def folders(tmp_path):
    """See `write_folders`."""
    return write_folders(tmp_path)
