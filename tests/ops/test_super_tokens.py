"""Super token kernels against the equations in saccade.tokens.super_tokens, at sizes the cell does not divide."""

import pytest
import torch
from torch.library import opcheck

from saccade import ops
from saccade.ops._launch import record_specializations
from saccade.ops.super_tokens import _collect, _group, _group_op, _spread, _spread_op
from saccade.tokens.super_tokens import group, spread
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn, zeros

pytestmark = needs_triton
SIZES = [(2, 20, 9, 7, 4), (1, 8, 7, 5, 2), (1, 16, 3, 3, 8)]
SIZES += [(4, 64, 56, 56, 8), (4, 128, 28, 28, 4), (2, 96, 61, 47, 8)] if DEVICE == "cuda" else []


def maps(*shape: int, dtype: torch.dtype = torch.float32):
    return randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_group_matches_reference(size, dtype):
    *shape, cell = size
    check(group, maps(*shape, dtype=dtype), cell)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_spread_matches_reference(size, dtype):
    batch, channels, height, width, cell = size
    rows, columns = -(-height // cell), -(-width // cell)
    association = randn(batch, rows, columns, 9, cell * cell).softmax(3).to(dtype)
    check_constant_association(randn(batch, rows, columns, channels, dtype=dtype), association, cell, height, width)


def check_constant_association(tokens, association, *sizes):
    def bound(tokens):
        return spread(tokens, association.to(tokens.dtype), *sizes)

    bound.implementation = lambda tokens: spread.implementation(tokens, association, *sizes)
    bound.reference = lambda tokens: spread.reference(tokens, association.to(tokens.dtype), *sizes)
    check(bound, tokens)


def test_results_do_not_depend_on_strides():
    x = randn(1, 8, 5, 6)
    contiguous = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    for result, expected in zip(_group(x.permute(0, 2, 3, 1), 4), _group(contiguous, 4), strict=True):
        assert torch.equal(result, expected)
        assert result.is_contiguous()


def test_spread_keeps_the_gradient_of_an_association_that_has_one():
    tokens, association = randn(1, 2, 2, 8), randn(1, 2, 2, 9, 4).requires_grad_()
    with kernels_allowed():
        assert spread.implementation(tokens, association.detach(), 2, 4, 4) == "triton"
        assert spread.implementation(tokens, association, 2, 4, 4) == "reference"
        with torch.no_grad():
            assert spread.implementation(tokens, association, 2, 4, 4) == "triton"


@pytest.mark.parametrize(
    ("features", "options", "reason"),
    [
        (zeros(1, 8, 6, 6), {}, "not channels-last"),
        (maps(1, 8, 6, 6), dict(iterations=2), "two iterations"),
        (maps(1, 8, 6, 6), dict(iterations=0), "no iterations"),
        (maps(1, 8, 6, 6), dict(mask_border=True), "masked border"),
        (maps(1, 8, 6, 6), dict(detach=False), "gradient through the association"),
        (maps(1, 512, 6, 6), {}, "more than 256 channels"),
        (maps(1, 8, 6, 6).double(), {}, "float64"),
    ],
)
def test_group_uses_reference_where_the_kernel_does_not_apply(features, options, reason):
    with kernels_allowed():
        assert group.implementation(maps(1, 8, 6, 6), 4) == "triton"
        assert group.implementation(maps(1, 8, 6, 6), 32) == "reference"  # large cells
        assert group.implementation(features, 4, **options) == "reference", reason
        with ops.disabled("super_token_group"):
            assert group.implementation(maps(1, 8, 6, 6), 4) == "reference"


def test_an_empty_batch_stays_empty():
    with kernels_allowed():
        tokens, association = group(maps(0, 8, 6, 6), 4)
        assert (tokens.shape, association.shape) == ((0, 2, 2, 8), (0, 2, 2, 9, 16))
        assert spread(tokens, association, 4, 6, 6).shape == (0, 8, 6, 6)


def test_one_set_of_kernels_serves_all_sizes():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 120):
            features = zeros(size % 3, size, size + 5, 16).permute(0, 3, 1, 2).requires_grad_()
            tokens, association = group(features, 8)
            output = spread(tokens, association, 8, size, size + 5)
            torch.autograd.grad(output, features, torch.zeros_like(output))
    names = sorted(specialization.kernel for specialization in compiled)
    assert names == [
        "_associate_kernel", "_cell_mean_kernel", "_mean_kernel", "_parts_kernel", "_spread_kernel", "_sum_kernel",
    ]  # fmt: skip


def test_operators_are_consistent():
    x = randn(1, 5, 6, 8)
    opcheck(_group_op.operator, (x.clone().requires_grad_(), 4))
    _, association, _ = _group(x, 4)
    opcheck(_spread_op.operator, (randn(1, 2, 2, 8).requires_grad_(), association, 4, 5, 6))


def test_every_output_element_is_written(monkeypatch):
    def poisoned(make):
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    x = randn(2, 7, 9, 20)
    tokens, association, weight = _group(x, 4)
    outputs = [tokens, association, weight, _spread(tokens, association, 4, 7, 9), _collect(x, association, 4)]
    assert all(output.isfinite().all() for output in outputs)
