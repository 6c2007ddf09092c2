"""LayerNorm kernels against their references, norms before an MLP, and which implementation is chosen."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.library import opcheck

import saccade
from saccade import ops
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm, TokenNorm
from saccade.ops._launch import record_specializations
from saccade.ops.layer_norm import (
    TrainableLayerNorm,
    _add_norm,
    _bias_norm,
    _norm,
    add,
    add_prenorm,
    bias_norm,
    channel_norm,
    layer_norm,
    prenorm,
    trainable_norm,
)
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn, relative_error, zeros

SHAPES = [(3, 70, 40), (1, 5, 5, 96), (2, 1, 300), (1, 1, 1), (7, 64)]


def parameters(dim: int, dtype: torch.dtype = torch.float32):
    return randn(dim, dtype=dtype, seed=1), randn(dim, dtype=dtype, seed=2)


def maps(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Channels-last features (B, C, H, W)."""
    return randn(*shape, dtype=dtype, seed=seed).contiguous(memory_format=torch.channels_last)


@needs_triton
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm_matches_reference(shape, dtype, backward):
    check(layer_norm, randn(*shape, dtype=dtype) + 1, *parameters(shape[-1]), 1e-6, backward=backward)


@needs_triton
def test_layer_norm_reads_half_precision_parameters():
    check(layer_norm, randn(5, 48, dtype=HALF), *parameters(48, HALF), 1e-6)


@needs_triton
@pytest.mark.parametrize("shape", [(2, 40, 5, 3), (3, 16, 1, 1), (1, 24, 1, 7)])
def test_channel_norm_matches_reference_and_keeps_the_layout(shape):
    features, (weight, bias) = maps(*shape), parameters(shape[1])
    check(channel_norm, features, weight, bias, 1e-6)
    with kernels_allowed():
        assert channel_norm(features, weight, bias, 1e-6).stride() == features.stride()


@needs_triton
def test_channel_norm_accepts_gradients_of_any_layout():
    features, (weight, bias) = maps(2, 8, 3, 5).requires_grad_(), parameters(8)
    g = randn(2, 8, 3, 5, seed=3)
    with kernels_allowed():
        (result,) = torch.autograd.grad(channel_norm(features, weight, bias, 1e-6), features, g)
    (expected,) = torch.autograd.grad(channel_norm.reference(features, weight, bias, 1e-6), features, g)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_bias_norm_matches_reference(dtype):
    check(bias_norm, randn(2, 5, 5, 96, dtype=dtype), randn(96, seed=5), *parameters(96), 1e-6, backward=False)


@needs_triton
def test_empty_batches_stay_empty():
    with kernels_allowed():
        assert layer_norm(randn(0, 7, 8), *parameters(8), 1e-6).shape == (0, 7, 8)
        tokens = randn(0, 8).requires_grad_()
        weight = randn(8).requires_grad_()
        (g_weight,) = torch.autograd.grad(layer_norm(tokens, weight, randn(8), 1e-6).sum(), weight)
        assert torch.equal(g_weight, torch.zeros_like(g_weight))


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (zeros(4, 2, 8).transpose(0, 1), "not contiguous"),
        (zeros(1, 4096), "more than 2048 channels"),
        (zeros(2, 8, dtype=torch.float64), "float64"),
    ],
)
def test_layer_norm_uses_reference_where_the_kernel_does_not_apply(tokens, reason):
    parameters = 1 + zeros(tokens.shape[-1]), zeros(tokens.shape[-1]), 1e-6
    with kernels_allowed():
        assert layer_norm.implementation(zeros(2, 8), zeros(8), zeros(8), 1e-6) == "triton"
        assert layer_norm.implementation(tokens, *parameters) == "reference", reason
        with ops.disabled("layer_norm"):
            assert layer_norm.implementation(zeros(2, 8), zeros(8), zeros(8), 1e-6) == "reference"


@needs_triton
def test_compiled_training_uses_the_reference_and_compiled_inference_the_kernel(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    inputs = maps(1, 8, 2, 2), torch.ones(8), zeros(8), 1e-6
    with kernels_allowed():
        assert channel_norm.implementation(*inputs) == "reference"
        with torch.no_grad():
            assert channel_norm.implementation(*inputs) == "triton"


@needs_triton
def test_layer_norm_compiles_one_kernel_per_width_for_all_sizes():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 100):
            tokens = zeros(size % 5, size, 96)
            layer_norm(tokens, zeros(96), zeros(96), 1e-6)
            output = layer_norm(tokens.requires_grad_(), zeros(96), zeros(96), 1e-6)
            torch.autograd.grad(output.sum(), tokens)
    assert len(compiled) == 2  # forward, in inference and training, and backward


@needs_triton
def test_norm_operators_are_consistent():
    x, (weight, bias) = randn(3, 5, 8), parameters(8)
    opcheck(_norm.operator, (x, weight, bias, 1e-6))
    opcheck(_norm.operator, (x.clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), 1e-6))
    opcheck(_add_norm.operator, (x, randn(3, 5, 8, seed=1), weight.detach(), bias.detach(), 1e-6))
    opcheck(_bias_norm.operator, (x, randn(8), weight.detach(), bias.detach(), 1e-6))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_prenorm_matches_sum_and_norm(dtype):
    norm = ChannelNorm(40).to(DEVICE)
    nn.init.normal_(norm.weight)
    features, update = maps(2, 40, 5, 3, dtype=dtype), maps(2, 40, 5, 3, dtype=dtype, seed=1)
    with torch.no_grad(), kernels_allowed():
        assert add_prenorm.implementation(features, update, norm, torch.sin) == "triton"
        total, output = add_prenorm(features, update, norm, torch.sin)
        expected = torch.sin(norm.double()(total.double()))
    assert relative_error(total, features + update) < 1e-2  # the interpreter truncates where GPUs round
    assert relative_error(output, expected) < (1e-5 if dtype == torch.float32 else 2e-2)


@needs_triton
def test_add_prenorm_uses_reference_where_the_kernel_does_not_apply():
    norm, features, update = ChannelNorm(8).to(DEVICE), maps(1, 8, 2, 3), maps(1, 8, 2, 3, seed=1)
    hooked, subclass = ChannelNorm(8), type("Other", (ChannelNorm,), {})(8)
    hooked.register_forward_hook(lambda *_: None)
    with kernels_allowed():
        assert add_prenorm.implementation(features, update, norm, torch.sin) == "reference"  # autograd records
        with torch.no_grad():
            assert add_prenorm.implementation(features, update, norm, torch.sin) == "triton"
            assert add_prenorm.implementation(features, update.contiguous(), norm, torch.sin) == "reference"
            assert add_prenorm.implementation(features, update.half(), norm, torch.sin) == "reference"
            for other in (hooked, subclass, TokenNorm(3), nn.Identity(), nn.BatchNorm2d(8)):
                assert add_prenorm.implementation(features, update, other, torch.sin) == "reference"


def test_add_is_in_memory_order_under_torch_compile(monkeypatch):
    features, update = maps(2, 8, 3, 5), maps(2, 8, 3, 5, seed=1)
    assert add.implementation(features, update) == "reference"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert add.implementation(features, update) == "channels_last"
    assert add.implementation(features.contiguous(), update) == "reference"
    assert torch.equal(add(features, update), features + update)
    assert add(features, update).stride() == features.stride()


def test_prenorm_calls_other_norms_and_branches_as_they_are():
    norm, x = ChannelNorm(4), torch.randn(2, 4, 3, 3)
    assert prenorm.implementation(norm, torch.sin, x) == "reference"
    torch.testing.assert_close(prenorm(norm, torch.sin, x), norm(x).sin(), rtol=0, atol=0)


@needs_triton
def test_trainable_norm_is_for_eager_training_without_hooks(monkeypatch):
    norm, features = ChannelNorm(8).to(DEVICE), maps(1, 8, 2, 3)
    with kernels_allowed():
        assert trainable_norm(norm, features) == TrainableLayerNorm(1e-6)
        assert trainable_norm(norm, features.contiguous()) is None
        assert trainable_norm(TokenNorm(3).to(DEVICE), features) is None
        with torch.no_grad():
            assert trainable_norm(norm, features) is None
        with ops.enabled(False):
            assert prenorm.implementation(norm, torch.sin, features) == "reference"
        assert trainable_norm(norm.requires_grad_(False), features) is None
        assert trainable_norm(norm, features.requires_grad_()) is not None
        hook = norm.register_forward_hook(lambda *_: None)
        assert trainable_norm(norm, features) is None
        hook.remove()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert trainable_norm(norm, features) is None


@needs_triton
def test_prenorm_of_a_conv_mlp_is_one_autograd_function():
    mlp, norm = ConvMlp(8, 16).to(DEVICE, HALF), ChannelNorm(8).to(DEVICE, HALF)
    features = maps(1, 8, 2, 3).to(HALF).contiguous(memory_format=torch.channels_last)
    with kernels_allowed():
        assert type(prenorm(norm, mlp, features).grad_fn).__name__ == "_TrainConvMlpBackward"
        normed = []
        mlp.register_forward_hook(lambda _, inputs, output: normed.append(inputs[0]))  # must then be called itself
        prenorm(norm, mlp, features)
        torch.testing.assert_close(normed[0], norm(features))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano"])
def test_models_train_the_same_as_with_references(name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=3, depths=(1, 1, 1, 1)).to(DEVICE).train()
    images = torch.randn(2, 3, 64, 64).to(DEVICE)

    def step(model):
        output = model(images)
        output.square().sum().backward()
        return [output.detach(), *(p.grad for p in model.parameters()), *model.buffers()]

    with ops.enabled(False):
        expected = step(deepcopy(model))
    with kernels_allowed():
        result = step(deepcopy(model))
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * float(b.abs().max()) + 1e-6)
