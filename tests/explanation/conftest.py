import pytest

from saccade.data.synthetic.photos import photo_paths


@pytest.fixture(scope="session")
def cat():
    """Path of a bundled photograph."""
    return photo_paths()["cat"]
