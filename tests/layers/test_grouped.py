"""Grouped linear maps as one product for all groups, as GPUs take them: the same numbers."""

import pytest
import torch

import saccade
from saccade.layers import kept, linear
from saccade.layers.linear import FixedLinear, FoldedLinearNorm, GroupedLinear, whole

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def joined(monkeypatch):
    """Take one product for all groups on any device, as for groups too wide for the kernel, and count."""
    taken, original = [], linear.whole
    monkeypatch.setattr(linear, "are_groups", lambda *_: False)
    monkeypatch.setattr(linear, "suits", lambda *_: True)
    monkeypatch.setattr(linear, "whole", lambda weight: taken.append(1) or original(weight))
    return taken


@pytest.mark.parametrize(("groups", "inputs", "outputs"), [(1, 3, 5), (4, 2, 3), (16, 8, 4)])
def test_the_whole_matrix_has_the_groups_on_its_diagonal(groups, inputs, outputs):
    weight = torch.randn(groups, inputs, outputs, dtype=torch.float64, requires_grad=True)
    matrix = whole(weight)
    assert torch.equal(matrix, torch.block_diag(*weight.transpose(1, 2)))
    g = torch.randn_like(matrix)
    ours, theirs = (torch.autograd.grad(m, weight, g)[0] for m in (matrix, torch.block_diag(*weight.transpose(1, 2))))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_grouped_layer_answers_and_learns_the_same(joined, autocast):
    torch.manual_seed(0)
    layer, vectors = GroupedLinear(24, 40, 8).to(DEVICE), torch.randn(3, 7, 24, device=DEVICE, requires_grad=True)
    g = torch.randn(3, 7, 40, device=DEVICE)
    exact = torch.einsum("bngc,gcd->bngd", vectors.double().unflatten(2, (8, -1)), layer.weight.double()).flatten(2)
    expected = torch.autograd.grad(exact, (vectors, layer.weight), g.double())
    layer, seen = (layer, vectors) if autocast else (layer.bfloat16(), vectors.bfloat16())
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        ours = layer(seen)
    assert joined == [1]
    assert ours.dtype == torch.bfloat16
    found = (ours, *torch.autograd.grad(ours, (vectors, layer.weight), g.bfloat16()))
    for a, b in zip(found, (exact, *expected), strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()


def test_float32_stays_a_product_a_group(joined):
    GroupedLinear(8, 8, 2)(torch.randn(1, 3, 8))
    assert joined == []


@torch.no_grad()
@pytest.mark.parametrize("groups", [2, 8])
def test_with_fixed_statistics_the_same(joined, groups):
    torch.manual_seed(0)
    layer = FoldedLinearNorm(16, 32, groups).eval()
    layer.norm.bn.running_mean.normal_()
    layer.norm.bn.running_var.uniform_(0.5, 2)
    layer.norm.bn.bias.normal_()
    layer, vectors = layer.to(DEVICE), torch.randn(2, 5, 16, device=DEVICE)
    exact = layer.double()(vectors.double())
    layer.float()
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = layer.grouped(vectors)
        ours_flat = layer(vectors)
    assert len(joined) == 2
    assert ours.shape == (2, 5, groups, 32 // groups)
    assert torch.equal(ours.flatten(2), ours_flat)
    assert (ours_flat.double() - exact).norm() < 1e-2 * exact.norm()


@torch.no_grad()
def test_a_frozen_layer_makes_its_matrix_once_and_again_when_it_changes(joined):
    layer = FixedLinear(torch.randn(4, 2, 3).bfloat16(), torch.randn(12).bfloat16())
    kept.never_change(layer.parameters())
    vectors = torch.randn(2, 5, 8).bfloat16()
    first = layer(vectors)
    assert torch.equal(layer(vectors), first)
    assert joined == [1]
    layer.weight.mul_(2)
    layer.bias.mul_(2)
    torch.testing.assert_close(layer(vectors), 2 * first)
    assert joined == [1, 1]


@torch.no_grad()
def test_an_optimised_vt_answers_the_same(joined):
    torch.manual_seed(0)
    model = saccade.create_model("vt_nano", num_classes=7).eval().to(DEVICE)
    images = torch.randn(2, 3, 64, 64, device=DEVICE)
    exact = model(images)
    assert joined == []
    ours = saccade.optimize(model, torch.bfloat16)(images)
    assert joined
    assert (ours.float() - exact).norm() < 5e-2 * exact.norm()


@torch.no_grad()
def test_a_compiler_follows(joined):
    layer = FoldedLinearNorm(16, 32, 4).eval().to(DEVICE)
    vectors = torch.randn(2, 5, 16, device=DEVICE)
    torch._dynamo.reset()
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, exact = torch.compile(layer, fullgraph=True, backend="aot_eager")(vectors), layer(vectors)
    torch.testing.assert_close(ours, exact)
    torch._dynamo.reset()
