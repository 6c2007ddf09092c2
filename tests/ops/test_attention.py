"""Attention kernels against their references, and which implementation is chosen."""

import pytest
import torch
from torch.library import opcheck

from saccade import ops
from saccade.ops import attention
from saccade.ops._launch import record_specializations
from tests.ops.compare import HALF, check, kernels_allowed, needs_triton, randn

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("batch", "count", "dim", "heads"),
    [(2, 49, 32, 8), (1, 9, 48, 6), (2, 64, 64, 1), (1, 1, 16, 1), (2, 17, 96, 3), (2, 36, 16, 2), (2, 36, 48, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_self_attention_matches_reference(batch, count, dim, heads, dtype):
    check(attention.self_attention, randn(batch, count, 3 * dim, dtype=dtype), heads)


def test_self_attention_of_an_empty_batch_is_empty():
    with kernels_allowed():
        assert attention.self_attention(randn(0, 49, 96), 2).shape == (0, 49, 32)


def test_self_attention_stays_finite_for_large_scores():
    qkv = 100 * randn(1, 5, 48)
    check(attention.self_attention, qkv, 2, tolerance=1e-4)


@pytest.mark.parametrize(
    ("qkv", "heads", "reason"),
    [
        (torch.zeros(2, 65, 192), 16, "more than 64 tokens"),
        (torch.zeros(2, 49, 144), 4, "heads of 12 channels"),
        (torch.zeros(2, 49, 24), 2, "fewer than 16 channels"),
        (torch.zeros(2, 49, 768), 2, "heads of 128 channels"),
        (torch.zeros(49, 2, 192).transpose(0, 1), 16, "not contiguous"),
        (torch.zeros(2, 49, 192, dtype=torch.float64), 16, "float64"),
    ],
)
def test_self_attention_uses_reference_where_the_kernel_does_not_apply(qkv, heads, reason):
    with kernels_allowed():
        assert attention.self_attention.implementation(torch.zeros(2, 49, 192), 16) == "triton"
        assert attention.self_attention.implementation(qkv, heads) == "reference", reason
        with ops.enabled(False):
            assert attention.self_attention.implementation(torch.zeros(2, 49, 192), 16) == "reference"


def test_self_attention_compiles_one_kernel_for_all_sizes():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 65):
            attention.self_attention(torch.zeros(size % 5, size, 192), 8)
    assert len(compiled) == 1


def test_self_attention_operator_is_consistent():
    opcheck(attention._self_attention.operator, (randn(2, 9, 96).requires_grad_(), 2))
