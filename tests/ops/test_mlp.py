"""The convolutional MLP: fused training and CPU inference against its layers, and which implementation is chosen."""

import copy

import pytest
import torch
from torch import nn

from saccade import ops
from saccade.layers.mlp import ConvMlp, TokenMlp
from saccade.ops import mlp as mlp_ops
from saccade.ops._dispatch import plain_layer
from saccade.ops.mlp import conv_mlp
from tests.ops.compare import DEVICE, HALF, kernels_allowed, needs_triton, randn, relative_error


def features_of(*shape, dtype=HALF, seed=0):
    return randn(*shape, dtype=dtype, seed=seed).contiguous(memory_format=torch.channels_last)


def outputs_and_gradients(run, x, module, g):
    y = run(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], g)]


@needs_triton
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("act_first", "shortcut"), [(True, True), (False, True), (False, False)])
def test_fused_training_matches_the_layers(act_first, shortcut, autocast):
    torch.manual_seed(0)
    mlp = ConvMlp(8, 24, act_first, shortcut=shortcut).to(DEVICE, torch.float32 if autocast else HALF)
    exact = copy.deepcopy(mlp).double()
    x, g = features_of(2, 8, 5, 7).requires_grad_(), features_of(2, 8, 5, 7, seed=1)
    with kernels_allowed(), torch.autocast(DEVICE, HALF, enabled=autocast):
        assert conv_mlp.implementation(x, mlp) == "training"
        results = outputs_and_gradients(mlp, x, mlp, g)  # backward inside the context of autocast too
    assert results[0].is_contiguous(memory_format=torch.channels_last)
    expected = outputs_and_gradients(exact, x.detach().double().requires_grad_(), exact, g.double())
    for result, reference in zip(results, expected, strict=True):
        assert relative_error(result, reference) < 1e-2
    assert [result.dtype for result in results[1:]] == [x.dtype, *(weight.dtype for weight in mlp.parameters())]


@needs_triton
def test_fused_training_of_an_input_without_gradient():
    mlp = ConvMlp(8, 16).to(DEVICE, HALF)
    with kernels_allowed():
        mlp(features_of(1, 8, 3, 3)).float().sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())


@needs_triton
def test_fused_training_works_with_activation_checkpointing():
    mlp, x = ConvMlp(8, 16).to(DEVICE, HALF), features_of(1, 8, 3, 3).requires_grad_()
    with kernels_allowed():
        expected = torch.autograd.grad(mlp(x).float().square().sum(), x)[0]
        y = torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(y.float().square().sum(), x)[0], expected)


class Adapted(nn.Linear):
    pass


@needs_triton
@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: mlp.fc2.bias.requires_grad_(False),
        lambda mlp: mlp.conv.register_forward_hook(lambda *_: None),
        lambda mlp: mlp.drop1.register_forward_hook(lambda *_: None),
        lambda mlp: mlp.norm.register_forward_hook(lambda *_: None),
        lambda mlp: setattr(mlp, "fc1", nn.Sequential(mlp.fc1)),
        lambda mlp: setattr(mlp, "fc1", Adapted(8, 16).to(DEVICE, HALF)),
        lambda mlp: setattr(mlp, "conv", nn.Conv2d(16, 16, 3, padding=1).to(DEVICE, HALF)),
    ],
    ids=["frozen", "hook", "dropout hook", "norm hook", "sequential", "subclass", "dense convolution"],
)
def test_changed_layers_are_called_themselves(change):
    mlp, x = ConvMlp(8, 16).to(DEVICE, HALF), features_of(1, 8, 3, 3)
    with kernels_allowed():
        assert conv_mlp.implementation(x, mlp) == "training"
        change(mlp)
        assert conv_mlp.implementation(x, mlp) == "reference"


@needs_triton
def test_training_is_fused_for_channels_last_half_precision_without_dropout():
    plain, dropout = ConvMlp(8, 16, False).to(DEVICE, HALF), ConvMlp(8, 16, False, drop=0.5).to(DEVICE, HALF)
    x = features_of(1, 8, 3, 3)
    with kernels_allowed():
        assert conv_mlp.implementation(x, plain) == "training"
        assert conv_mlp.implementation(x, dropout) == "reference"
        assert conv_mlp.implementation(x, dropout.eval()) == "training"
        assert conv_mlp.implementation(x, ConvMlp(8, 16, conv=False).to(DEVICE, HALF)) == "reference"
        assert conv_mlp.implementation(x, ConvMlp(8, 16, sub_norm=True).to(DEVICE, HALF)) == "reference"
        assert conv_mlp.implementation(x.contiguous(), plain) == "reference"
        assert conv_mlp.implementation(x.float(), plain.float()) == "reference"
        with torch.no_grad():
            assert conv_mlp.implementation(x, plain.to(HALF)) == "reference"


def test_conv_mlp_is_a_plain_layer_until_it_has_hooks():
    mlp = ConvMlp(8, 16)
    assert ops._dispatch.is_plain(mlp)
    mlp.register_forward_hook(lambda *_: None)
    assert not ops._dispatch.is_plain(mlp)
    assert plain_layer(Adapted) is Adapted
    ops._dispatch._plain_layers.remove(Adapted)


# ------------------------------------------------------------------ inference


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda: TokenMlp(16, 64), True),
        (lambda: ConvMlp(16, 64), True),
        (lambda: ConvMlp(16, 64, False), False),
        (lambda: ConvMlp(16, 64, shortcut=False), True),
    ],
)
def test_half_precision_inference_matches_float64(make, fused):
    torch.manual_seed(0)
    layer = make().to(DEVICE).eval()
    x = randn(2, 9, 16) if isinstance(layer, TokenMlp) else features_of(2, 16, 5, 4, dtype=torch.float32)
    exact = layer.double()(x.double())
    layer.to(HALF)
    with kernels_allowed():
        if isinstance(layer, ConvMlp):
            assert conv_mlp.implementation(x.to(HALF), layer) == ("linear_gelu" if fused else "reference")
        assert relative_error(layer(x.to(HALF)), exact) < 2e-2


@pytest.mark.skipif(not mlp_ops.HAS_ONEDNN, reason="this build of PyTorch has no oneDNN")
@torch.no_grad()
@pytest.mark.parametrize("act_first", [True, False])
@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("images_per_chunk", [1, 2, 100])
def test_onednn_matches_the_layers(monkeypatch, act_first, shortcut, images_per_chunk):
    torch.manual_seed(0)
    mlp = ConvMlp(12, 48, act_first=act_first, shortcut=shortcut).eval()
    x = torch.randn(3, 12, 9, 7).contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(mlp_ops, "CHUNK", images_per_chunk * 4 * 9 * 7 * 48)
    assert conv_mlp.implementation(x, mlp) == "onednn"
    output = mlp(x)
    with ops.enabled(False):
        assert conv_mlp.implementation(x, mlp) == "reference"
        expected = mlp(x)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert mlp(x[:0]).shape == (0, 12, 9, 7)


@pytest.mark.skipif(not mlp_ops.HAS_ONEDNN, reason="this build of PyTorch has no oneDNN")
@torch.no_grad()
def test_onednn_is_for_evaluation_of_plain_layers():
    mlp, x, calls = ConvMlp(12, 48).eval(), torch.randn(1, 12, 4, 4), []
    assert conv_mlp.implementation(x, mlp) == "onednn"
    assert conv_mlp.implementation(x, mlp.train()) == "reference"
    handle = mlp.eval().fc1.register_forward_hook(lambda *_: calls.append(1))
    mlp(x)
    assert calls == [1]
    handle.remove()
    mlp.fc2 = nn.Sequential(nn.Linear(48, 12), nn.Tanh())
    assert mlp(x).abs().max() <= 1
