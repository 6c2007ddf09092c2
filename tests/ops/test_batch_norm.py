"""BatchNorm kernels of training against PyTorch's: outputs, gradients, running statistics, choice of implementation."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from saccade import ops
from saccade.ops import _rows, batch_norm
from saccade.ops._launch import record_specializations
from tests.ops.compare import DEVICE, check, kernels_allowed, needs_triton, randn, zeros

pytestmark = needs_triton


def norm_of(weight: Tensor, bias: Tensor, layer: type = nn.BatchNorm2d, dtype: torch.dtype = torch.float32) -> Any:
    """A norm in training whose parameters are these tensors, so that gradients reach them; fixed running statistics."""
    channels = weight.shape[0]
    norm = layer(channels).train().to(DEVICE, torch.float64 if weight.dtype == torch.float64 else dtype)
    norm.running_mean.copy_(randn(channels, seed=1))
    norm.running_var.copy_(randn(channels, seed=2).square())
    norm._parameters.clear()
    norm.weight, norm.bias = weight, bias
    return norm


class NormAct:
    """`norm_act` as a function of tensors; also returns the running statistics that it leaves."""

    def __init__(self, act: str = "", pre_act: str = ""):
        self.act, self.pre_act = act, pre_act

    def arguments(self, features, weight, bias, shortcut=None):
        layer = nn.BatchNorm1d if features.ndim == 2 else nn.BatchNorm2d
        return features, norm_of(weight, bias, layer), shortcut, self.act, self.pre_act

    def implementation(self, *inputs):
        return batch_norm.norm_act.implementation(*self.arguments(*inputs))

    def run(self, function, inputs):
        arguments = self.arguments(*inputs)
        y, norm = function(*arguments), arguments[1]
        assert norm.num_batches_tracked == 1
        return y, norm.running_mean, norm.running_var

    def __call__(self, *inputs):
        return self.run(batch_norm.norm_act, inputs)

    def reference(self, *inputs):
        return self.run(batch_norm.norm_act.reference, inputs)


def inputs_of(shape, shortcut, dtype=torch.float32, level=1.0):
    features = randn(*shape).add(level).to(dtype)
    inputs = [features, randn(shape[1], seed=3), randn(shape[1], seed=4)]
    inputs += [randn(*shape, seed=5, dtype=dtype)] if shortcut else []
    return [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs]


@pytest.mark.parametrize("act", ["", "relu"])
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("shape", [(300, 40), (70, 300), (2, 12, 5, 3), (3, 16, 1, 1), (4, 1, 3, 2), (1, 8, 9, 7)])
def test_norm_act_matches_reference(shape, shortcut, act):
    check(NormAct(act), *inputs_of(shape, shortcut))


@settings(max_examples=8, deadline=None)
@given(st.integers(6, 200), st.integers(1, 140), st.booleans(), st.booleans())
def test_norm_act_matches_reference_at_any_size(rows, channels, relu, shortcut):
    check(NormAct("relu" if relu else ""), *inputs_of((rows, channels), shortcut))


@pytest.mark.parametrize("shape", [(40, 40), (700, 40), (2, 12, 5, 3)])
def test_norm_act_applies_a_gelu_before_the_norm(shape):
    check(NormAct("", "gelu"), *inputs_of(shape, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shortcut", [False, True])
def test_norm_act_matches_reference_in_half_precision(shortcut, dtype):
    # PyTorch rounds the norm before the sum: a sum near zero then has another sign before the ReLU. Hence float64.
    check(NormAct("relu"), *inputs_of((2000, 64), shortcut, dtype), tolerance=1e-2)


def test_norm_act_steps_over_many_rows(monkeypatch):
    monkeypatch.setattr(_rows, "PROGRAMS", 3)
    check(NormAct("relu"), *inputs_of((1500, 20), True))


def test_norm_act_keeps_its_digits_for_a_mean_far_from_zero():
    check(NormAct(), *inputs_of((300, 16), False, level=1000.0), tolerance=1e-3)


@pytest.mark.parametrize("shortcut", [False, True])
def test_norm_act_propagates_nan(shortcut):
    features, weight, bias, *shortcuts = inputs_of((20, 3), shortcut)
    features[4, 1] = float("nan")
    with kernels_allowed():
        y = NormAct("relu")(features, weight, bias, *shortcuts)[0]
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()


def test_norm_act_keeps_the_memory_layout_and_accepts_a_contiguous_gradient():
    features, weight, bias = inputs_of((2, 12, 5, 3), False)
    features.requires_grad_()
    with kernels_allowed():
        y = NormAct("relu")(features, weight, bias)[0]
        g_x = torch.autograd.grad(y, features, randn(2, 12, 5, 3))[0]
    assert y.stride() == g_x.stride() == features.stride()


@pytest.mark.parametrize(
    "case",
    ["synchronised", "cumulative average", "evaluation", "hook", "no gradient", "one value", "contiguous", "subclass",
     "no parameters", "float64", "disabled"],
)  # fmt: skip
def test_norm_act_uses_reference_where_the_kernels_do_not_apply(case):
    class Subclass(nn.BatchNorm2d):
        pass

    layer = {"synchronised": nn.SyncBatchNorm, "subclass": Subclass}.get(case, nn.BatchNorm2d)
    norm = layer(4, momentum=None if case == "cumulative average" else 0.1, affine=case != "no parameters").to(DEVICE)
    if case == "hook":
        norm.register_forward_hook(lambda *_: None)
    norm.train(case != "evaluation")
    features = zeros(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    with kernels_allowed():
        assert batch_norm.norm_act.implementation(features, nn.BatchNorm2d(4).to(DEVICE)) == "triton"
        if case == "one value":
            features = zeros(1, 4, 1, 1)
        if case == "contiguous":
            features = features.contiguous()
        if case == "float64":
            features = features.double()
        with torch.set_grad_enabled(case != "no gradient"), ops.enabled(case != "disabled"):
            assert batch_norm.norm_act.implementation(features, norm) == "reference"


@pytest.mark.parametrize("options", [{"act": "silu"}, {"pre_act": "relu"}, {"shortcut": zeros(2, 4, 1, 1)}])
def test_norm_act_uses_reference_for_other_functions(options):
    features = zeros(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    with kernels_allowed():
        assert batch_norm.norm_act.implementation(features, nn.BatchNorm2d(4).to(DEVICE), **options) == "reference"


def test_norm_act_compiles_the_same_kernels_for_all_sizes_and_wide_layers():
    norms = [nn.BatchNorm2d(channels).to(DEVICE) for channels in (128, 256, 512, 1024)]
    with kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(2, 40):
            for norm in norms:
                shape = size % 3 + 1, norm.num_features, size, size + 5
                features = torch.empty(shape, memory_format=torch.channels_last, device=DEVICE).requires_grad_()
                batch_norm.norm_act(features, norm, act="relu").sum().backward()
    # Sums, statistics, output, partial sums of the gradient, their sum (of few rows, and of many), gradient.
    assert len(compiled) == 7
