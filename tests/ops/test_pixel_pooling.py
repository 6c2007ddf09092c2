"""Softmax over pixels and pooling by an assignment against their references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from saccade import ops
from saccade.ops._launch import record_specializations
from saccade.ops.pixel_pooling import _pixel_softmax, pixel_softmax, pool_pixels
from saccade.tokens.clusters import ClusterTokenizer, LinearClustering
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn, relative_error, zeros

pytestmark = needs_triton
LENGTHS = [4, 12, 16, 100, 196, 1028] + ([3136, 16384] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("length", LENGTHS)
def test_pixel_softmax_matches_reference(length, dtype):
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}[dtype]  # of rounded weights
    check(pixel_softmax, 3 * randn(2, 3, length, dtype=dtype), tolerance=tolerance)


@settings(max_examples=20, deadline=None)
@given(quads=st.integers(1, 75), offset=st.floats(-200, 200), seed=st.integers(0, 9))
def test_rows_sum_to_one_for_large_scores(quads, offset, seed):
    with kernels_allowed():
        weights = pixel_softmax(50 * randn(2, 2, 4 * quads, seed=seed) + offset)
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    assert weights.min() >= 0


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (zeros(1, 2, 16388), "more than 16384 pixels"),
        (zeros(1, 2, 49), "not a multiple of 4 pixels"),
        (zeros(2, 3, 4).transpose(1, 2), "not contiguous"),
        (zeros(1, 2, 3, dtype=torch.float64), "float64"),
    ],
)
def test_pixel_softmax_uses_reference_where_the_kernel_does_not_apply(scores, reason):
    with kernels_allowed():
        assert pixel_softmax.implementation(zeros(1, 2, 16384)) == "triton"
        assert pixel_softmax.implementation(scores) == "reference", reason
        with ops.enabled(False):
            assert pixel_softmax.implementation(zeros(1, 2, 16384)) == "reference"


def test_pixel_softmax_compiles_three_tiles_for_all_sizes():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 129):
            pixel_softmax(zeros(size % 5, 3, size * size))
            pixel_softmax(zeros(size % 5, 3, 4 * size))
    assert sorted(dict(specialization.constants)["LENGTH"] for specialization in compiled) == [1024, 4096, 16384]


def test_empty_batches_stay_empty():
    with kernels_allowed():
        assert pixel_softmax(zeros(0, 3, 4)).shape == (0, 3, 4)
        pooled = pool_pixels(zeros(0, 3, 4, dtype=HALF), zeros(0, 4, 5, dtype=HALF))
        assert pooled.shape == (0, 3, 5)


def test_operators_are_consistent():
    scores = randn(2, 3, 4).requires_grad_()
    opcheck(_pixel_softmax.operator, (scores,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (HALF, 1e-2)])
def test_a_tokenizer_gives_the_same_tokens_and_gradients(dtype, tolerance):
    torch.manual_seed(0)
    tokenizer = ClusterTokenizer(16, LinearClustering(16, 5)).to(DEVICE, dtype)
    features, g = randn(2, 16, 2, 6, dtype=dtype).requires_grad_(), randn(2, 5, 16, dtype=dtype, seed=1)

    def step():
        tokens, assignment, _ = tokenizer(features)
        return tokens, assignment, torch.autograd.grad(tokens, features, g)[0]

    with ops.enabled(False):
        expected = step()
    with kernels_allowed():
        results = step()
    for result, reference in zip(results, expected, strict=True):
        assert relative_error(result.detach(), reference.detach()) < tolerance
