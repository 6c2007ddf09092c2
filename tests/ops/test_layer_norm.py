"""LayerNorm kernels against their references, and which implementation is chosen."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.library import opcheck

import saccade
from saccade import ops
from saccade.layers.norm import ChannelNorm, TokenNorm
from saccade.ops._launch import record_specializations
from saccade.ops.layer_norm import (
    _add_norm,
    _norm,
    add,
    add_norm,
    layer_norm,
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
def test_norm_of_features_matches_float64_and_keeps_the_layout(shape):
    norm, features, g = ChannelNorm(shape[1]).to(DEVICE), maps(*shape).requires_grad_(), randn(*shape, seed=3)
    nn.init.normal_(norm.weight)
    exact, doubled = deepcopy(norm).double(), features.detach().double().requires_grad_()
    with kernels_allowed(), ops.record_implementations() as used:
        output = norm(features)
        gradients = torch.autograd.grad(output, [features, *norm.parameters()], g)  # contiguous, not channels-last
    assert used == {("layer_norm", "triton")}
    assert output.stride() == features.stride()
    expected = torch.autograd.grad(exact(doubled), [doubled, *exact.parameters()], g.double())
    for ours, reference in zip([output, *gradients], [exact(doubled), *expected], strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-5)


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
def test_norms_are_left_to_inductor_but_not_their_sums_in_inference(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    features, norm = maps(1, 8, 2, 2), ChannelNorm(8).to(DEVICE)
    with kernels_allowed():
        assert layer_norm.implementation(zeros(2, 8), zeros(8), zeros(8), 1e-6) == "reference"
        assert add_norm.implementation(features, features, norm) == "reference"
        with torch.no_grad():
            assert add_norm.implementation(features, features, norm) == "triton"


@needs_triton
def test_layer_norm_compiles_one_kernel_per_width_for_all_sizes():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 100):
            tokens = zeros(size % 5, size, 96)
            layer_norm(tokens, zeros(96), zeros(96), 1e-6)
            output = layer_norm(tokens.requires_grad_(), zeros(96), zeros(96), 1e-6)
            torch.autograd.grad(output.sum(), tokens)
    assert len(compiled) == 4  # forward, in inference and training, backward, and its sum over few rows and many


@needs_triton
def test_norm_operators_are_consistent():
    x, (weight, bias) = randn(3, 5, 8), parameters(8)
    opcheck(_norm.operator, (x, weight, bias, 1e-6))
    opcheck(_norm.operator, (x.clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), 1e-6))
    opcheck(_add_norm.operator, (x, randn(3, 5, 8, seed=1), weight.detach(), bias.detach(), 1e-6))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_matches_float64(dtype):
    norm = ChannelNorm(40).to(DEVICE)
    nn.init.normal_(norm.weight)
    features, update = maps(2, 40, 5, 3, dtype=dtype), maps(2, 40, 5, 3, dtype=dtype, seed=1)
    with torch.no_grad(), kernels_allowed():
        assert add_norm.implementation(features, update, norm) == "triton"
        total, normed = add_norm(features, update, norm)
        expected = norm.double()(total.double())
    assert relative_error(total, features + update) < 1e-2  # the interpreter truncates where GPUs round
    assert relative_error(normed, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert total.stride() == normed.stride() == features.stride()


@needs_triton
def test_add_norm_uses_reference_where_the_kernel_does_not_apply():
    norm, features, update = ChannelNorm(8).to(DEVICE), maps(1, 8, 2, 3), maps(1, 8, 2, 3, seed=1)
    hooked, subclass = ChannelNorm(8), type("Other", (ChannelNorm,), {})(8)
    hooked.register_forward_hook(lambda *_: None)
    with kernels_allowed():
        assert add_norm.implementation(features, update, norm) == "reference"  # autograd records
        with torch.no_grad():
            assert add_norm.implementation(features, update, norm) == "triton"
            assert add_norm.implementation(features, update.contiguous(), norm) == "reference"
            assert add_norm.implementation(features, update.half(), norm) == "reference"
            for other in (hooked, subclass, TokenNorm(3), nn.Identity(), nn.BatchNorm2d(8)):
                assert add_norm.implementation(features, update, other) == "reference"


def test_add_norm_calls_other_norms_as_they_are():
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)
    total, normed = add_norm(x, x, norm.eval())
    assert torch.equal(total, x + x)
    assert torch.equal(normed, norm(x + x))


def test_add_is_in_memory_order_under_torch_compile(monkeypatch):
    features, update = maps(2, 8, 3, 5), maps(2, 8, 3, 5, seed=1)
    assert add.implementation(features, update) == "reference"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert add.implementation(features, update) == "channels_last"
    assert add.implementation(features.contiguous(), update) == "reference"
    assert torch.equal(add(features, update), features + update)
    assert add(features, update).stride() == features.stride()


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
