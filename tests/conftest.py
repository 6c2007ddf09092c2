"""Before anything imports Triton: without a GPU its kernels run in the interpreter."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def float32_is_float32():
    """Disable TF32: convolutions and products with 10 bits of fraction differ by 1e-3."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="session", autouse=True)
def no_embedded_weights(tmp_path_factory):
    """What a test says does not hang on what is embedded; those about it open the real folder themselves."""
    from tests.weights.folder import weights_in

    with weights_in(tmp_path_factory.mktemp("weights")):
        yield
