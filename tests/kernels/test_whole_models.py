"""Whole models with every kernel they would take on a GPU, in Triton's interpreter, against the library alone."""

import sys
from copy import deepcopy

import pytest
import torch

import saccade
from saccade.kernels import HAS_TRITON, enabled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there are no kernels to take"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = ["svit_nano", "paca_nano", "sparseformer_nano", "vt_nano", "vt_resnet18"]


def take_kernels(monkeypatch) -> None:
    """Let every place that asks whether a kernel suits hear yes, on any device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("saccade.") and not name.endswith(".onednn") and callable(getattr(module, "suits", None)):
            monkeypatch.setattr(module, "suits", lambda *tensors: True)


def learn(model: torch.nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    model = deepcopy(model).train()
    found = model(images)
    found.square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"answer": found.detach()} | gradients | dict(model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_learns_and_answers_the_same(name, monkeypatch):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=5).to(DEVICE).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 64, 64, device=DEVICE).to(memory_format=torch.channels_last)
    with enabled(False), torch.no_grad():
        answer = model.eval()(images)
    with enabled(False):
        expected = learn(model, images)
    take_kernels(monkeypatch)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), answer, rtol=1e-4, atol=1e-5)
    ours = learn(model, images)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        # In front of a batch norm a bias has no gradient: both are rounding there, which the second term lets pass.
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()) + 1e-5, msg=key)
