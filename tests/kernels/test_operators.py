"""What compilers are told about the operators (shapes, strides, gradients, no hidden writes) is what they do."""

import os
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from saccade.kernels import HAS_TRITON, allowed, blocks, depthwise, layer_norm, looking, pool, super_tokens, trusted
from saccade.layers.norm import TokenNorm
from saccade.tokens.super_tokens import SuperTokenizer

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there are no operators")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
# A compiler looks into operators made by `triton_op`, which the interpreter cannot follow.
SEEN_THROUGH = ("test_schema",) if DEVICE == "cpu" else ("test_schema", "test_faketensor")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def values(*shape, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_(grad)


def turned(*shape, grad=False):
    """(B, H, W, C) with other strides than its shape says: how a gradient may arrive under a compiler."""
    batch, height, width, channels = shape
    return values(batch, channels, height, width).permute(0, 2, 3, 1).requires_grad_(grad)


@pytest.mark.parametrize("make", [values, turned])
def test_super_token_operators_keep_their_word(make):
    x = make(1, 5, 6, 8, grad=True)
    opcheck(super_tokens._group_op, (x, 4, 1e-12), test_utils=CHECKS)
    tokens, association, weight = super_tokens._group_op(x.detach(), 4, 1e-12)
    assert all(value.is_contiguous() for value in (tokens, association, weight))
    opcheck(super_tokens._spread_op, (make(1, 2, 2, 8, grad=True), association, 4, 5, 6), test_utils=CHECKS)
    opcheck(super_tokens._collect_op, (x.detach(), association, 4), test_utils=CHECKS)


def test_strides_do_not_change_the_answer():
    x = values(1, 8, 5, 6)
    channels_last = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    for ours, other in zip(
        super_tokens._group_op(channels_last, 4, 1e-12),
        super_tokens._group_op(x.permute(0, 2, 3, 1), 4, 1e-12),
        strict=True,
    ):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("make", [values, turned])
def test_looking_operators_keep_their_word(make):
    x, points = make(2, 5, 6, 8, grad=True), values(2, 3, 4, 2).sigmoid().detach().requires_grad_()
    opcheck(looking._sample_op, (x, points), test_utils=CHECKS)
    g = values(2, 3, 8, 4).transpose(2, 3)  # as a gradient may arrive
    opcheck(looking._sample_gradients_op, (g, x.detach(), points.detach()), test_utils=CHECKS)
    matrices = values(2, 3, 8, 8), values(2, 3, 4, 4)
    given = x.detach(), points.detach(), *matrices, values(8), values(4)
    opcheck(looking._mix_op, given, test_utils=CHECKS)
    turned_round = [matrix.transpose(2, 3).contiguous().transpose(2, 3) for matrix in matrices]
    assert torch.equal(looking._mix_op(*given[:2], *turned_round, *given[4:]), looking._mix_op(*given))


def test_placing_keeps_its_word():
    given = values(2, 3, 4), values(2, 3, 4).abs(), values(2, 3, 10), values(10), 1.0, 1e-5, 8.0
    opcheck(looking._place_op, given, test_utils=CHECKS)


def test_exported_programs_hold_no_kernels():
    class Asks(torch.nn.Module):
        def forward(self, x):
            return x + (10 if allowed("mix") else 1), x + (10 if allowed("norm_relu") else 1)

    x = torch.zeros(1)
    assert [float(y) for y in Asks()(x)] == [10, 10]
    assert [float(y) for y in torch.compile(Asks(), backend="eager", fullgraph=True)(x)] == [10, 1]
    for strict in (False, True):
        assert [float(y) for y in torch.export.export(Asks(), (x,), strict=strict).module()(x)] == [1, 1]


@pytest.mark.parametrize("act", [0, 1, 2])
def test_depthwise_gradients_do_not_alias_or_write_their_inputs(act):
    x, g = values(1, 5, 3, 8), values(1, 5, 3, 8)
    weight, bias = values(8, 1, 3, 3), values(8)
    opcheck(depthwise._gradients_op, (g, x, weight, bias, act, True), test_utils=SEEN_THROUGH)
    opcheck(depthwise._op, (x, weight, bias, act, True), test_utils=SEEN_THROUGH)


def test_layer_norm_keeps_its_word():
    x, weight, bias = values(3, 5, 8), values(8), values(8)
    opcheck(layer_norm._op, (x, weight, bias, 1e-6), test_utils=SEEN_THROUGH)


def test_poisoned_memory_never_shows(monkeypatch):
    """Every element of every output is written: memory that starts as NaN leaves none behind."""

    def poisoned(make):
        def empty(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    x = values(2, 7, 9, 20)
    tokens, association, weight = super_tokens._group(x, 4, 1e-12)
    back = super_tokens._spread(tokens, association, 4, 7, 9)
    found = [tokens, association, weight, back, super_tokens._collect(x, association, 4)]
    weights, bias = values(20, 1, 3, 3), values(20)
    for act in (0, 1, 2):
        found += [depthwise._forward(x, weights, bias, act, True)]
        found += depthwise._gradients(x, x, weights, bias, act, True)
    normed, statistics = layer_norm._forward(x, bias, bias, 1e-6)
    found += [normed, statistics, *layer_norm._gradients(x, x, bias, statistics)]
    pooled, where, scales = pool._pool_rows(x, bias, True, 1e-6, 0.9)
    found += [pooled, scales, *pool._pool_rows_gradients(pooled, pooled, where, scales, 7, 9, True, True, 1e-6, 0.9)]
    images, kernel = values(2, 3, 7, 9), values(20, 3, 7, 7)
    stem = blocks._stem_rows(images, kernel, torch.float32)
    found += [stem, blocks._stem_rows_gradient(stem, images, torch.float32)]
    assert all(value.isfinite().all() for value in found)


def test_compilers_take_only_what_is_trusted(monkeypatch):
    assert allowed("batch_norm")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert allowed("layer_norm")
    assert not allowed("batch_norm")
    with trusted("super_tokens"):
        assert allowed("super_tokens")
        assert not allowed("layer_norm")


def test_nothing_here_runs_on_a_cpu_by_itself():
    if DEVICE == "cpu":
        features = values(1, 8, 8, 8).contiguous(memory_format=torch.channels_last)
        assert not SuperTokenizer(4).fits_kernel(features)
        assert torch.equal(TokenNorm(8)(features), torch.nn.functional.layer_norm(features, (8,), eps=1e-6))


# Torch 2.11's compiler hands a Python number to a kernel as float64.
NUMBERS_AS_FLOAT64 = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from saccade.kernels import layer_norm

norm = dict(KEPT=True, ROWS=8, CHANNELS=128)
for kernel, pointers, constants in (
    (layer_norm._forward_kernel, ["*bf16", "*fp32", "*fp32", "*bf16", "*fp32"], norm),
):
    kinds = dict(zip(kernel.arg_names, [*pointers, "i32", "i32", "fp64"])) | dict.fromkeys(constants, "constexpr")
    text = triton.compile(ASTSource(kernel, kinds, constants), target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    print("xf64" in text, "f64" in text)
"""


def test_numbers_in_float64_leave_tensors_in_float32(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", NUMBERS_AS_FLOAT64], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


CARRIED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from saccade.kernels.depthwise import _weight_kernel

kinds = ["*bf16", "*bf16", "*fp32", "i32", "i32", "i32", "i32"]
constants = dict(PRE=False, WHOLE=True, ROWS=16, SPANS=1, CHANNELS=128)
kinds = dict(zip(_weight_kernel.arg_names, kinds)) | dict.fromkeys(constants, "constexpr")
text = triton.compile(ASTSource(_weight_kernel, kinds, constants), target=GPUTarget("cuda", 90, 32)).asm["ttir"]
rows = next(line for line in text.splitlines() if "scf.for %row" in line)
print(rows.partition("iter_args(")[2].partition(")")[0].count("="))
"""


def test_all_rows_of_gradients_are_carried_from_row_to_row(tmp_path):
    """Ten sums, and the gradients of two rows in four columns: what a compiler may lose, and an interpreter not."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CARRIED], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["18"], done.stderr
