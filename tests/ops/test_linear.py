"""Linear operations against their references, and which implementation is chosen."""

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade import ops
from saccade.layers.linear import FixedLinear, FoldedLinearNorm, Linear
from saccade.ops import linear as linear_ops
from saccade.ops._launch import record_specializations
from saccade.ops._weights import freeze_weights
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn, relative_error

needs_onednn = pytest.mark.skipif(not linear_ops.HAS_ONEDNN, reason="this build of PyTorch has no oneDNN")


# ------------------------------------------------------------------ linear


@needs_triton
def test_linear_trains_in_half_precision_like_the_reference(monkeypatch):
    monkeypatch.setattr(linear_ops, "MIN_ROWS", 8)
    weight, bias = randn(40, 24, dtype=HALF).requires_grad_(), randn(40, dtype=HALF).requires_grad_()
    check(linear_ops.linear, randn(2, 30, 24, dtype=HALF), weight, bias)


@needs_triton
@pytest.mark.parametrize("bias", [True, False])
def test_linear_trains_under_autocast_with_float32_gradients(bias):
    inputs = [randn(*shape).requires_grad_() for shape in ((2, 30, 24), (40, 24), (40,))[: 3 if bias else 2]]
    g = randn(2, 30, 40, dtype=HALF, seed=1)
    with kernels_allowed(), torch.autocast(DEVICE, HALF):
        assert linear_ops.linear.implementation(*inputs) == "triton"
        output = linear_ops.linear(*inputs)
        gradients = torch.autograd.grad(output, inputs, g)
    doubled = [value.detach().double().requires_grad_() for value in inputs]
    exact = linear_ops.linear_reference(*doubled)
    expected = torch.autograd.grad(exact, doubled, g.double())
    for ours, reference in zip([output, *gradients], [exact, *expected], strict=True):
        assert relative_error(ours.detach(), reference.detach()) < 1e-2
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@needs_triton
def test_linear_trains_without_a_gradient_of_its_input(monkeypatch):
    monkeypatch.setattr(linear_ops, "MIN_ROWS", 8)
    x, layer = randn(30, 24, dtype=HALF), Linear(24, 8).to(DEVICE, HALF)
    with kernels_allowed():
        layer(x).float().sum().backward()
    assert relative_error(layer.bias.grad, torch.full((8,), 30.0, device=DEVICE)) < 1e-3


@needs_triton
def test_linear_trains_fused_where_weights_are_cast_or_rows_are_many():
    def chosen(x, layer):
        with kernels_allowed():
            return linear_ops.linear.implementation(x, layer.weight, layer.bias)

    layer, x = Linear(4, 4).to(DEVICE, HALF), torch.zeros(linear_ops.MIN_ROWS, 4, dtype=HALF, device=DEVICE)
    assert chosen(x, layer) == "triton"
    assert chosen(x[1:], layer) == "reference"
    assert chosen(x.float(), Linear(4, 4).to(DEVICE)) == "reference"
    assert chosen(x, Linear(4, 4, bias=False).to(DEVICE, HALF)) == "triton"
    with torch.autocast(DEVICE, HALF):
        assert chosen(x[:2], Linear(4, 4).to(DEVICE)) == "triton"
    assert chosen(x, Linear(4, 4).to(DEVICE, HALF).requires_grad_(False)) == "reference"
    with torch.no_grad():
        assert chosen(x, layer) == "reference"


@needs_onednn
@pytest.mark.parametrize("shape", [(3, 7, 12), (5, 12), (2, 3, 4, 12), (0, 12)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_onednn_linear_matches_reference(shape, bias):
    layer, x = nn.Linear(12, 20, bias=bias), torch.randn(shape)
    assert linear_ops.linear.implementation(x, layer.weight, layer.bias) == "onednn"
    torch.testing.assert_close(linear_ops.linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)


@needs_onednn
def test_onednn_is_for_eager_float32_inference_on_cpus():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert linear_ops.linear.implementation(x, weight) == "reference"  # autograd is on
    with torch.no_grad():
        assert linear_ops.linear.implementation(x, weight) == "onednn"
        assert linear_ops.linear.implementation(x.double(), weight.double()) == "reference"
        assert linear_ops.linear.implementation(x.to("meta"), weight.to("meta")) == "reference"
        assert linear_ops.linear.implementation(x, weight.half()) == "reference"
        with torch.autocast("cpu", torch.bfloat16):
            assert linear_ops.linear.implementation(x, weight) == "reference"
        with ops.enabled(False):
            assert linear_ops.linear.implementation(x, weight) == "reference"
        with FlopCounterMode(display=False) as counter:
            Linear(4, 5)(x)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5


@torch.no_grad()
def test_linear_traces_by_fx_and_torch_compile():
    layer, x = Linear(4, 5), torch.randn(3, 4)
    torch.testing.assert_close(symbolic_trace(layer)(x), layer(x))
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


# ------------------------------------------------------------------ linear_gelu


@needs_triton
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_linear_gelu_matches_the_exact_gelu(autocast):
    torch.manual_seed(0)
    layer, x = Linear(40, 56).to(DEVICE), 2 * randn(3, 7, 40)
    exact = linear_ops.linear_gelu_reference(x.double(), layer.double())
    layer = layer.float() if autocast else layer.to(HALF)
    x = x if autocast else x.to(HALF)
    with kernels_allowed(), torch.autocast(DEVICE, HALF, enabled=autocast):
        assert linear_ops.linear_gelu.implementation(x, layer) == "cublas"
        output = linear_ops.linear_gelu(x, layer)
    assert output.dtype == HALF
    assert output.shape == exact.shape
    assert relative_error(output, exact) < 1e-2
    with kernels_allowed():
        assert linear_ops.linear_gelu(x[:0].to(HALF), layer.to(HALF)).shape == (0, 7, 56)


@needs_triton
def test_linear_gelu_is_fused_in_eager_half_precision_inference():
    layer, x = nn.Linear(8, 8).to(DEVICE, HALF), torch.randn(3, 8, device=DEVICE).to(HALF)
    with kernels_allowed():
        assert linear_ops.linear_gelu.implementation(x, layer) == "reference"  # autograd is on
        with torch.no_grad():
            assert linear_ops.linear_gelu.implementation(x, layer) == "cublas"
            assert linear_ops.linear_gelu.implementation(x.float(), layer) == "reference"
            assert linear_ops.linear_gelu.implementation(x.repeat(1, 2)[:, ::2], layer) == "reference"
            assert linear_ops.linear_gelu.implementation(x, nn.Linear(8, 8, bias=False).to(x)) == "reference"
            assert linear_ops.linear_gelu.implementation(x, nn.Sequential(layer)) == "reference"
            layer.register_forward_hook(lambda *_: None)
            assert linear_ops.linear_gelu.implementation(x, layer) == "reference"


# ------------------------------------------------------------------ linear_fixed_layout


@needs_triton
@pytest.mark.parametrize("training", [False, True])
def test_linear_fixed_layout_is_one_operator_under_compile(training):
    torch.manual_seed(0)
    layer, x = Linear(16, 27).to(DEVICE), randn(2, 9, 16).requires_grad_(training)
    targets = []

    def backend(module, _):
        targets.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    torch.compiler.reset()
    run = torch.compile(lambda x: linear_ops.linear_fixed_layout(x, layer), backend=backend, fullgraph=True)
    with kernels_allowed(), torch.set_grad_enabled(training), torch.autocast(DEVICE, torch.bfloat16):
        output, expected = run(x), layer(x)
    assert torch.ops.saccade.linear_fixed_layout.default in targets
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected)
    if training:
        g, inputs = randn(2, 9, 27).bfloat16(), (x, *layer.parameters())
        for ours, reference in zip(
            torch.autograd.grad(output, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True
        ):
            assert ours.dtype == reference.dtype
            assert relative_error(ours, reference) <= 1e-2


def test_linear_fixed_layout_is_the_layer_in_eager_mode():
    layer, x = Linear(4, 3), torch.randn(2, 4)
    assert linear_ops.linear_fixed_layout.implementation(x, layer) == "reference"
    assert torch.equal(linear_ops.linear_fixed_layout(x, layer), layer(x))


def test_linear_fixed_layout_operator_is_consistent():
    inputs = [torch.randn(size, requires_grad=True) for size in ((5, 4), (3, 4), (3,))]
    opcheck(torch.ops.saccade.linear_fixed_layout.default, inputs)


# ------------------------------------------------------------------ grouped_linear

SIZES = [(2, 25, 2, 16, 16), (1, 7, 3, 20, 40), (1, 130, 1, 33, 17)]  # B, N, groups, channels of a group in and out


def grouped_inputs(batch, count, groups, inputs, outputs):
    return (
        randn(batch, count, groups * inputs, dtype=HALF),
        randn(groups, inputs, outputs, dtype=HALF),
        randn(groups * outputs, dtype=HALF),
    )


@needs_triton
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear_matches_reference(size, bias):
    inputs = grouped_inputs(*size)
    check(linear_ops.grouped_linear, *(inputs if bias else inputs[:2]))


@needs_triton
def test_grouped_weight_gradients_of_one_and_many_programs_agree(monkeypatch):
    x, weight, _ = grouped_inputs(1, 150, 2, 16, 32)
    g, results = randn(150, 64, dtype=HALF, seed=1), []
    for programs in (1, 100):
        monkeypatch.setattr(linear_ops, "PROGRAMS", programs)
        results.append(linear_ops._grouped_gradients(g, x[0], weight)[1])
    assert relative_error(*results) < 1e-3


@needs_triton
def test_grouped_linear_of_an_empty_batch_is_empty():
    x, weight, bias = (value.requires_grad_() for value in grouped_inputs(0, 5, 2, 16, 32))
    with kernels_allowed():
        assert linear_ops.grouped_linear.implementation(x, weight, bias) == "triton"
        output = linear_ops.grouped_linear(x, weight, bias)
        assert output.shape == (0, 5, 64)
        assert torch.autograd.grad(output.sum(), weight)[0].abs().sum() == 0


@needs_triton
def test_grouped_linear_operator_is_consistent():
    x, weight, bias = (value.requires_grad_() for value in grouped_inputs(1, 9, 2, 16, 16))
    opcheck(linear_ops._grouped_linear.operator, (x.detach()[0].requires_grad_(), weight, bias))
    opcheck(linear_ops._grouped_linear.operator, (x.detach()[0].requires_grad_(), weight, None))


@needs_triton
def test_grouped_linear_chooses_by_width_and_dtype():
    def chosen(inputs=64, outputs=64, dtype=HALF, transposed=False):
        x = torch.empty(2, 4, 2 * inputs, dtype=dtype, device=DEVICE)
        x = x.transpose(0, 1) if transposed else x
        weight = torch.empty(2, inputs, outputs, dtype=dtype, device=DEVICE)
        return linear_ops.grouped_linear.implementation(x, weight)

    assert chosen() == "reference" or DEVICE == "cuda"
    with kernels_allowed():
        assert [chosen(), chosen(16, 128)] == ["triton"] * 2
        assert [chosen(8), chosen(64, 129), chosen(transposed=True)] == ["block_diagonal"] * 3
        assert chosen(dtype=torch.float32) == "reference"


@needs_triton
def test_grouped_linear_compiles_one_kernel_for_all_sizes():
    with kernels_allowed(), torch.no_grad(), record_specializations(execute=False) as compiled:
        for count in range(1, 200):
            linear_ops.grouped_linear(
                torch.zeros(count % 5, count, 64, dtype=HALF, device=DEVICE),
                torch.zeros(2, 32, 32, dtype=HALF, device=DEVICE),
            )
    assert len(compiled) == 1


@needs_triton
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(3, 7, 8, 3, 5), (1, 1, 1, 3, 5), (2, 3, 2, 130, 140)])
def test_wide_groups_match_reference(size, bias):
    inputs = grouped_inputs(*size)
    check(linear_ops.grouped_linear, *(inputs if bias else inputs[:2]), implementation="block_diagonal")


@needs_triton
@pytest.mark.parametrize("groups", [2, 8])
@torch.no_grad()
def test_folded_norm_matches_float64_in_half_precision(groups):
    torch.manual_seed(0)
    layer = FoldedLinearNorm(32, 64, groups).eval()
    layer.norm.bn.running_mean.normal_()
    layer.norm.bn.running_var.uniform_(0.5, 2)
    layer.norm.bn.bias.normal_()
    layer, x = layer.to(DEVICE), randn(2, 5, 32)
    exact = layer.double()(x.double())
    layer.float()
    with kernels_allowed(), torch.autocast(DEVICE, HALF):
        assert relative_error(layer(x), exact) < 1e-2


@needs_triton
@torch.no_grad()
def test_frozen_layer_builds_its_matrix_once_and_again_when_the_weight_changes(monkeypatch):
    layer = FixedLinear(randn(4, 2, 3, dtype=HALF), randn(12, dtype=HALF))
    freeze_weights(layer.parameters())
    built, build = [], torch.block_diag
    monkeypatch.setattr(torch, "block_diag", lambda *blocks: built.append(1) or build(*blocks))
    x = randn(2, 5, 8, dtype=HALF)
    with kernels_allowed():
        first = layer(x)
        assert torch.equal(layer(x), first)
        assert built == [1]
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        torch.testing.assert_close(layer(x), 2 * first)
    assert built == [1, 1]


@needs_triton
@torch.no_grad()
def test_optimized_vt_computes_its_groups_in_half_precision():
    torch.manual_seed(0)
    model, images = saccade.create_model("vt_nano", num_classes=7).eval().to(DEVICE), randn(2, 3, 64, 64)
    exact = model(images)
    chosen = []
    with kernels_allowed(), ops.disabled(*(set(ops.REGISTRY) - {"grouped_linear"})):
        choose = linear_ops.grouped_linear.choose
        linear_ops.grouped_linear.choose = lambda *inputs: chosen.append(choose(*inputs)[0]) or choose(*inputs)
        try:
            output = saccade.optimize(model, HALF)(images)
        finally:
            del linear_ops.grouped_linear.choose
    assert chosen
    assert set(chosen) <= {"triton", "block_diagonal"}
    assert relative_error(output, exact) < 5e-2
