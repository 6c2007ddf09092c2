"""What follows a convolution in one pass against the library; SViT's and PaCa's convolutions against themselves."""

import pytest
import torch

import saccade
from saccade.kernels import HAS_TRITON
from saccade.kernels.epilogue import epilogue, epilogue_twin
from saccade.kernels.norm_relu import Norm
from saccade.layers import residual

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def some_norm(kind: str, channels: int) -> Norm | None:
    shift, gain = values(channels), values(channels + 1)[1:]
    whole = Norm(shift, gain, values(channels + 2)[2:], values(channels) ** 2, 1e-3)
    return {"none": None, "bias": Norm(shift), "affine": Norm(shift, gain), "norm": whole}[kind]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, 1e-2)])
@pytest.mark.parametrize("act", ["", "gelu", "silu"])
@pytest.mark.parametrize("norm", ["none", "bias", "affine", "norm"])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_its_twin(dtype, tolerance, act, norm, biased):
    features = values(2, 150, 5, 7).to(dtype).contiguous(memory_format=torch.channels_last)
    bias, numbers = values(150) if biased else None, some_norm(norm, 150)
    exact = epilogue_twin(
        features.double(),
        None if bias is None else bias.double(),
        act,
        None if numbers is None else Norm(*(v.double() if torch.is_tensor(v) else v for v in numbers)),
    )
    ours = epilogue(features.clone(), bias, act, numbers)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert (ours.double() - exact).norm() <= tolerance * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize(("name", "convolutions"), [("svit_nano", (4, 8)), ("paca_nano", (4, 4))])
@pytest.mark.parametrize("folded", [False, True])
def test_a_model_answers_the_same(monkeypatch, name, convolutions, folded):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=7).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    model = saccade.optimize(model) if folded else model
    images = torch.randn(2, 3, 40, 33).contiguous(memory_format=torch.channels_last)
    expected = model(images)
    taken = []
    twin = residual.epilogues.epilogue_twin
    monkeypatch.setattr(residual.epilogues, "epilogue_twin", lambda *args: taken.append(1) or twin(*args))
    monkeypatch.setattr(residual, "suits", lambda *_: True)  # on a CPU, what a GPU would do, with the kernel's twin
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert len(taken) == convolutions[folded]
