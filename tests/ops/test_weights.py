"""Weights cast in one batch and cached layouts: equal outputs, whatever happened to weights or model before."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade import ops
from saccade.layers.linear import GroupedLinear, Linear
from saccade.ops import _weights
from saccade.ops._model_pass import model_pass
from saccade.ops._weights import cached_layout, cast_weight, cast_weights, freeze_weights
from tests.ops.compare import DEVICE, kernels_allowed, needs_triton

FAMILIES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")


@pytest.fixture(autouse=True)
def cast_on_this_device():
    with kernels_allowed():
        yield


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = Linear(4, 3)
        self.casts = []

    @model_pass
    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.casts.append(cast_weight(self.fc.weight))
        return self.fc(x)


class Outer(nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.last = Linear(3, 3)
        self.casts = []

    @model_pass
    def forward(self, x):
        outputs = [model(x) for model in self.models]
        self.casts.append(cast_weight(self.last.weight))
        return self.last(sum(outputs))


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Small().to(DEVICE), torch.randn(5, 4, device=DEVICE)


def predict(model, x, dtype=torch.bfloat16):
    with torch.no_grad(), torch.autocast(DEVICE, dtype):
        return model(x)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def is_cast(model):
    return model.casts[-1] is not model.fc.weight


@pytest.mark.parametrize("name", FAMILIES)
def test_models_predict_the_same_with_fewer_casts(name, monkeypatch):
    torch.manual_seed(0)
    model, images = saccade.create_model(name, num_classes=7).eval().to(DEVICE), torch.randn(2, 3, 64, 64).to(DEVICE)
    with ops.disabled(*(set(ops.REGISTRY) - {"linear", "linear_gelu"})):  # the interpreter has no bfloat16 products
        with Count() as batched:
            output = predict(model, images)
        monkeypatch.setattr(ops._dispatch, "eager_autocast", lambda: None)
        with Count() as single:
            expected = predict(model, images)
    assert torch.equal(output, expected)
    assert batched.calls["_foreach_copy_"] == 1
    assert batched.calls["_to_copy"] < 0.85 * single.calls["_to_copy"]


def test_every_pass_sees_the_current_weights(small):
    model, x = small
    predict(model, x)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)
    predict(model, x)
    assert is_cast(model)
    assert torch.equal(model.casts[-1], model.fc.weight.bfloat16())
    model.fc.weight.data = model.fc.weight.data * 3
    predict(model, x)
    assert torch.equal(model.casts[-1], model.fc.weight.bfloat16())


def test_replaced_weights_and_other_dtypes(small):
    model, x = small
    predict(model, x)
    model.fc.weight = nn.Parameter(torch.ones(3, 4, device=DEVICE))
    assert torch.equal(predict(model, x), predict(nn.Sequential(model.fc), x))
    assert not is_cast(model)
    predict(model, x, torch.float16)
    assert model.casts[-1].dtype == torch.float16
    model.bfloat16()
    predict(model, x)
    assert not is_cast(model)  # only float32 is cast


def test_casts_end_with_the_pass_after_errors_too(small):
    model, x = small
    predict(model, x)
    assert not _weights.has_casts()
    with pytest.raises(RuntimeError):
        predict(model, x[:, :2])
    with torch.no_grad():
        assert cast_weights(model.fc.weight, model.fc.bias) == (model.fc.weight, model.fc.bias)
        assert not _weights.has_casts()


def trained(model, x):
    """Gradients by name of a step under autocast, as backward sees them."""
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        output = model(x)
    output.float().square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@needs_triton
def test_training_casts_the_weights_of_linear_layers_together(small, monkeypatch):
    model, x = small
    with ops.disabled("linear"):
        expected = trained(model, x)
    with kernels_allowed(), Count() as batched:
        gradients = trained(model, x)
    assert not is_cast(model)  # outside of autograd functions
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(_weights, "begin_pass", lambda model: False)
    with kernels_allowed(), Count() as single:
        trained(model, x)
    assert batched.calls["_foreach_copy_"] == 1
    assert batched.calls["_to_copy"] < single.calls["_to_copy"]


@needs_triton
def test_backward_after_the_next_pass_uses_the_weights_of_its_own(small):
    model, x = small
    with kernels_allowed(), torch.autocast(DEVICE, torch.bfloat16):
        expected = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
        first = model(x)
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 2.0)
        model(x)
        gradients = torch.autograd.grad(first.float().square().sum(), list(model.parameters()))
    for gradient, reference in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, reference)


@needs_triton
def test_casts_of_training_are_aligned(small):
    model = nn.ModuleList([Linear(3, 5), Linear(8, 8), Linear(8, 3), Linear(16, 8)]).to(DEVICE)
    plan = _weights._Plan(model, DEVICE, torch.bfloat16, trains=True)
    casts = plan.cast()
    assert set(casts) == set(model.parameters())
    for weight, cast in casts.items():
        assert torch.equal(cast, weight.bfloat16())
        assert cast.data_ptr() % 16 == 0 or weight.numel() % 8 > 0


def test_nothing_is_cast_without_autocast_or_with_ops_disabled(small):
    model, x = small
    with torch.no_grad():
        model(x)
        assert not is_cast(model)
        with ops.enabled(False):
            predict(model, x)
    assert not is_cast(model)


def test_training_inside_an_inference_pass_reads_the_weight_itself():
    class Trains(Small):
        @model_pass
        def forward(self, x):
            with torch.enable_grad():
                return super().forward(x)

    model = Trains().to(DEVICE)
    predict(model, torch.randn(5, 4, device=DEVICE)).float().sum().backward()
    assert not is_cast(model)
    assert model.fc.weight.grad is not None


def test_inference_mode_and_no_grad_agree(small):
    model, x = small
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        first = model(x)
    assert torch.equal(first, predict(model, x))


def test_a_model_inside_another_is_cast_by_the_outer_one(small):
    model, x = small
    outer = Outer(model).to(DEVICE)
    predict(outer, x)
    assert is_cast(model)
    assert outer.casts[-1] is not outer.last.weight  # still cast after the inner model has returned
    assert model not in _weights._plans
    assert not _weights.has_casts()


def graphs_of(model, x, training):
    """Targets of the nodes that torch.compile traces, by graph, and the result."""
    graphs = []

    def collect(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=collect))
    with torch.set_grad_enabled(training), torch.autocast(DEVICE, torch.bfloat16):
        result = compiled(x)
    if training:
        result.float().square().sum().backward()
    return graphs, result


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_models_cast_their_weights_by_one_operator(name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=7).to(DEVICE)
    with ops.disabled(*(set(ops.REGISTRY) - {"linear", "linear_gelu"})):  # the interpreter has no bfloat16 products
        graphs, _ = graphs_of(model, torch.randn(2, 3, 64, 64).to(DEVICE), True)
    assert [graph["saccade.cast_together.default"] for graph in graphs] == [1, 1]  # forward, backward


def test_compiled_casts_have_the_outputs_and_gradients_of_autocast(small):
    model, x = small
    _, result = graphs_of(model, x, training=True)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16), ops.enabled(False):
        expected = model(x)
    expected.float().square().sum().backward()
    assert torch.equal(result, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, parameter.grad)
    assert not _weights._traced_casts


def test_compiled_casts_compute_no_gradients_of_frozen_weights(small):
    model, x = Outer(small[0], small[0]).to(DEVICE), small[1]
    model.last.requires_grad_(False)
    graphs, _ = graphs_of(model, x, training=True)
    assert [graph["saccade.cast_together.default"] for graph in graphs] == [2, 1]
    frozen = graphs[1]["aten.mm.default"]
    model.requires_grad_(True).zero_grad()
    assert frozen < graphs_of(model, x, training=True)[0][1]["aten.mm.default"]


def test_gradients_of_unused_weights_stay_none():
    class Unused(Small):
        def __init__(self):
            super().__init__()
            self.unused = Linear(4, 3)

    model = Unused().to(DEVICE)
    graphs_of(model, torch.randn(5, 4, device=DEVICE), training=True)
    assert model.fc.weight.grad is not None
    assert model.unused.weight.grad is None


def test_compile_and_trace_cast_the_current_weights(small):
    model, x = small
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(predict(compiled, x), predict(model, x))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(model, x, check_trace=False)
    with torch.no_grad():
        model.fc.weight.mul_(2)
    assert torch.equal(traced(x), predict(model, x))
    assert torch.equal(predict(compiled, x), predict(model, x))


def test_export_and_fx_do_not_see_the_casts(small):
    model, x = small
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = model(x)
        program = torch.export.export(model, (x,))
        assert not [node for node in program.graph.nodes if "saccade" in str(node.target)]
        torch.testing.assert_close(program.module()(x), expected)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)


def test_models_have_no_hooks_and_copies_predict_the_same(small):
    model, x = small
    expected = predict(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(predict(other, x), expected)
        assert is_cast(other)
    built = saccade.create_model("svit_nano", depths=(1, 1, 1, 1))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in built.modules())


def test_weights_are_cast_once_and_kernels_that_read_float32_keep_theirs():
    model = nn.Module()
    model.a, model.b = Linear(4, 4), Linear(4, 4)
    model.b.weight = model.a.weight
    model.conv, model.depthwise = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4)
    model.norm, model.grouped = nn.LayerNorm(4), GroupedLinear(4, 4, 2)
    plan = _weights._Plan(model.to(DEVICE), DEVICE, torch.bfloat16, trains=False)
    expected = [
        model.a.weight, model.conv.weight, model.grouped.weight, model.a.bias, model.b.bias, model.conv.bias,
    ]  # fmt: skip
    assert [id(weight) for weight in plan.weights] == [id(weight) for weight in expected]


def test_cached_layout_is_built_once_per_version_of_a_frozen_weight():
    weight, built = torch.ones(3, device=DEVICE), []

    def layout():
        return cached_layout(weight, "double", lambda: built.append(1) or 2 * weight)

    layout()
    layout()
    assert len(built) == 2  # not frozen
    freeze_weights([weight])
    first = layout()
    assert layout() is first
    assert len(built) == 3
    weight.mul_(5)
    again = layout()
    assert again is first  # at the same address, for CUDA graphs that read it
    assert torch.equal(again, torch.full((3,), 10.0, device=DEVICE))
    weight.requires_grad_()
    layout()
    layout()
    assert len(built) == 6


def test_an_error_after_a_graph_break_leaves_no_stale_casts(small):
    model, x = small
    fails = []

    def break_graph(*_):
        torch._dynamo.graph_break()
        if fails:
            raise ValueError("stopped")

    model.fc.register_forward_hook(break_graph)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.autocast(DEVICE, torch.bfloat16):
        compiled(x)
        fails.append(True)
        with pytest.raises(ValueError, match="stopped"):
            compiled(x)
    assert not _weights._traced_casts
    fails.clear()
    with torch.no_grad():
        model.fc.weight.mul_(2)
    assert torch.equal(predict(compiled, x), predict(model, x))
