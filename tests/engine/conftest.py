import pytest

from saccade.engine.train import train
from tests.engine.runs import recipe


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """One short run with EMA and mixup, shared by the tests of its files."""
    out = tmp_path_factory.mktemp("run")
    return train(recipe("ema.decay=0.5", "augment.mixup=0.8"), out, command="saccade train …", progress=False)
