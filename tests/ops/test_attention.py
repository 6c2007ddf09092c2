"""Attention kernels against their references, and which implementation is chosen."""

import pytest
import torch
from torch.library import opcheck

from saccade import ops
from saccade.ops import attention
from saccade.ops._launch import record_specializations
from tests.ops.compare import HALF, check, kernels_allowed, needs_triton, randn, relative_error, zeros

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
        (zeros(2, 65, 192), 16, "more than 64 tokens"),
        (zeros(2, 49, 144), 4, "heads of 12 channels"),
        (zeros(2, 49, 24), 2, "fewer than 16 channels"),
        (zeros(2, 49, 768), 2, "heads of 128 channels"),
        (zeros(49, 2, 192).transpose(0, 1), 16, "not contiguous"),
        (zeros(2, 49, 192, dtype=torch.float64), 16, "float64"),
    ],
)
def test_self_attention_uses_reference_where_the_kernel_does_not_apply(qkv, heads, reason):
    with kernels_allowed():
        assert attention.self_attention.implementation(zeros(2, 49, 192), 16) == "triton"
        assert attention.self_attention.implementation(qkv, heads) == "reference", reason
        with ops.enabled(False):
            assert attention.self_attention.implementation(zeros(2, 49, 192), 16) == "reference"


def test_self_attention_compiles_three_tiles_for_all_sizes():
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 65):
            attention.self_attention(zeros(size % 5, size, 192), 8)
    assert len(compiled) == 3


def test_self_attention_operator_is_consistent():
    opcheck(attention._self_attention.operator, (randn(2, 9, 96).requires_grad_(), 2))


CROSS = [(2, 70, 100, 48, 2), (1, 5, 7, 33, 1), (3, 130, 16, 40, 1), (1, 9, 50, 64, 1)]  # B, N, M, D, heads
PIXELS = [(2, 3, 20, 40, 2), (1, 8, 70, 32, 1), (2, 17, 33, 48, 3)]  # B, M, N, D, heads
TOKENS = [(2, 16, 64, 32, 2), (1, 5, 80, 33, 1), (2, 20, 96, 60, 3)]  # B, M, E, D, heads


@pytest.mark.parametrize(("batch", "queries", "keys", "dim", "heads"), CROSS)
@pytest.mark.parametrize("scale", [None, 0.2])
def test_cross_attention_matches_reference(batch, queries, keys, dim, heads, scale):
    query, key_value = randn(batch, queries, dim, dtype=HALF), randn(batch, keys, 2 * dim, dtype=HALF)
    check(attention.cross_attention, query, key_value, heads, scale)


def test_cross_attention_gradients_of_one_and_many_programs_agree(monkeypatch):
    g, query = randn(1, 150, 32, dtype=HALF, seed=1), randn(1, 150, 32, dtype=HALF)
    key_value = randn(1, 20, 64, dtype=HALF)
    results = []
    for programs in (1, 528):
        monkeypatch.setattr(attention, "PROGRAMS", (programs, programs))
        results.append(attention._cross_gradients(g, query, key_value, 2, 0.25))
    for one, many in zip(*results, strict=True):
        assert relative_error(one, many) < 2e-3


def test_cross_attention_is_batch_invariant():
    query, key_value = randn(3, 20, 32, dtype=HALF), randn(3, 10, 64, dtype=HALF)
    batched = attention._cross_forward(query, key_value, 2, 0.25)
    alone = [attention._cross_forward(query[i : i + 1], key_value[i : i + 1], 2, 0.25) for i in range(3)]
    assert torch.equal(batched, torch.cat(alone))


@pytest.mark.parametrize(("batch", "tokens", "pixels", "dim", "heads"), PIXELS)
def test_pixel_pooling_attention_matches_reference(batch, tokens, pixels, dim, heads):
    query, key_value = randn(batch, tokens, dim, dtype=HALF), randn(batch, pixels, 2 * dim, dtype=HALF)
    check(attention.pixel_pooling_attention, query, key_value, heads, 0.3)


@pytest.mark.parametrize(("batch", "tokens", "both", "dim", "heads"), TOKENS)
def test_token_attention_matches_reference(batch, tokens, both, dim, heads):
    query_key, value = randn(batch, tokens, both, dtype=HALF), randn(batch, tokens, dim, dtype=HALF)
    check(attention.token_attention, query_key, value, heads)


def test_attention_of_an_empty_batch_is_empty():
    with kernels_allowed():
        wide, narrow = randn(0, 9, 64, dtype=HALF).requires_grad_(), randn(0, 9, 32, dtype=HALF)
        for op, inputs in (
            (attention.cross_attention, (narrow, wide, 2)),
            (attention.pixel_pooling_attention, (narrow, wide, 2, 0.25)),
            (attention.token_attention, (wide, narrow, 2)),
        ):
            assert op.implementation(*inputs) == "triton"
            mixed = op(*inputs)
            assert mixed.shape == (0, 9, 32)
            assert torch.autograd.grad(mixed.float().sum(), wide)[0].shape == (0, 9, 64)


def half(*shape):
    return zeros(*shape, dtype=HALF)


@pytest.mark.parametrize(
    ("op", "supported", "unsupported"),
    [
        (
            attention.cross_attention,
            [(half(1, 5, 96), half(1, 128, 192), 2), (half(1, 5, 128), half(1, 9, 256), 2)],
            [
                (half(1, 5, 96), half(1, 129, 192), 2),
                (half(1, 5, 130), half(1, 9, 260), 2),
                (half(1, 5, 16), half(1, 9, 32), 2),
                (half(1, 5, 96).float(), half(1, 9, 192).float(), 2),
                (half(1, 5, 96), half(1, 9, 192).float(), 2),
                (half(5, 2, 96).transpose(0, 1), half(2, 9, 192), 2),
            ],
        ),
        (
            attention.pixel_pooling_attention,
            [(half(2, 32, 32), half(2, 256, 64), 2, 0.25), (half(2, 8, 128), half(2, 49, 256), 2, 0.25)],
            [
                (half(2, 33, 32), half(2, 9, 64), 2, 0.25),
                (half(2, 8, 32), half(2, 257, 64), 2, 0.25),
                (half(2, 8, 16), half(2, 9, 32), 2, 0.25),
                (half(2, 8, 32).float(), half(2, 9, 64).float(), 2, 0.25),
            ],
        ),
        (
            attention.token_attention,
            [(half(2, 32, 64), half(2, 32, 128), 2)],
            [
                (half(2, 33, 64), half(2, 33, 128), 2),
                (half(2, 8, 32), half(2, 8, 128), 2),
                (half(2, 8, 64), half(2, 8, 130), 2),
                (half(2, 8, 64).float(), half(2, 8, 128).float(), 2),
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_attention_uses_kernels_for_few_tokens_in_half_precision(op, supported, unsupported):
    with kernels_allowed():
        assert [op.implementation(*inputs) for inputs in supported] == ["triton"] * len(supported)
        for inputs in unsupported:
            assert op.implementation(*inputs) == ("flash" if inputs[0].dtype == HALF else "reference")


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (attention.self_attention, (randn(2, 70, 192, dtype=HALF), 2)),
        (attention.self_attention, (randn(2, 70, 192, dtype=HALF), 2, randn(2, 70, 70, dtype=HALF))),
        (attention.cross_attention, (randn(2, 70, 64, dtype=HALF), randn(2, 130, 128, dtype=HALF), 2)),
        (attention.pixel_pooling_attention, (randn(2, 8, 32, dtype=HALF), randn(2, 300, 64, dtype=HALF), 2, 0.25)),
        (attention.token_attention, (randn(2, 64, 32, dtype=HALF), randn(2, 64, 64, dtype=HALF), 2)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_attention_to_many_tokens_uses_no_plan_per_shape(op, inputs):
    check(op, *inputs, implementation="flash")
    with kernels_allowed():
        with ops.fixed_shapes():
            assert op.implementation(*inputs) == "reference"
        assert op.implementation(*inputs) == "flash"
        assert op.implementation(inputs[0].float(), *inputs[1:]) == "reference"


@pytest.mark.parametrize(
    ("op", "inputs", "variants"),
    [
        (attention.cross_attention, lambda size, batch: (half(batch, 3 * size, 64), half(batch, size, 128), 2), 3),
        (
            attention.pixel_pooling_attention,
            lambda size, batch: (half(batch, size % 32 + 1, 64), half(batch, 2 * size, 128), 2, 0.25),
            3,
        ),
        (attention.token_attention, lambda size, batch: (half(batch, size, 64), half(batch, size, 64), 2), 2),
    ],
    ids=["cross", "pixels", "tokens"],
)
def test_attention_compiles_at_most_three_tiles_for_all_sizes(op, inputs, variants):
    with kernels_allowed(), torch.no_grad(), record_specializations(execute=False) as compiled:
        for size in range(1, 129):
            case = inputs(size, size % 5)
            if op.implementation(*case) == "triton":
                op(*case)
    assert len(compiled) == variants


@pytest.mark.slow
def test_attention_operators_are_consistent():
    narrow, wide = randn(2, 9, 32, dtype=HALF).requires_grad_(), randn(2, 9, 64, dtype=HALF).requires_grad_()
    opcheck(attention._cross_attention.operator, (narrow, wide, 2, 0.25))
    opcheck(attention._few_attention.operator, (narrow, wide, 2, 0.25, False))
    opcheck(attention._few_attention.operator, (wide, narrow, 2, 0.25, True))
