"""Weights cast in one batch and cached layouts: equal outputs, whatever happened to weights or model before."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import saccade
from saccade import ops
from saccade.layers.linear import GroupedLinear, Linear
from saccade.ops import _weights
from saccade.ops._weights import cached_layout, cast_weight, cast_weights, freeze_weights, install_weight_cast
from tests.ops.compare import DEVICE, kernels_allowed

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

    def forward(self, x):
        self.casts.append(cast_weight(self.fc.weight))
        return self.fc(x)


class Outer(nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.last = Linear(3, 3)
        self.casts = []

    def forward(self, x):
        outputs = [model(x) for model in self.models]
        self.casts.append(cast_weight(self.last.weight))
        return self.last(sum(outputs))


def installed(model):
    model = model.to(DEVICE)
    install_weight_cast(model)
    return model


@pytest.fixture
def small():
    torch.manual_seed(0)
    return installed(Small()), torch.randn(5, 4, device=DEVICE)


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


def test_an_interrupted_pass_leaves_no_stale_casts(small, monkeypatch):
    model, x = small

    def interrupt(x):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):  # for which PyTorch skips forward hooks
            predict(model, x)
    with torch.no_grad():
        model.fc.weight.mul_(2)
    predict(model, x)
    assert torch.equal(model.casts[-1], model.fc.weight.bfloat16())
    other = installed(Small())
    predict(other, x)
    assert is_cast(other)


def test_training_frees_the_memory_of_casts(small):
    model, x = small
    predict(model, x)
    assert model in _weights._plans
    with torch.autocast(DEVICE, torch.bfloat16):
        model(x).float().sum().backward()
    assert model not in _weights._plans
    assert not is_cast(model)
    assert model.fc.weight.grad is not None


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
        def forward(self, x):
            with torch.enable_grad():
                return super().forward(x)

    model = installed(Trains())
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
    outer = installed(Outer(model))
    predict(outer, x)
    assert is_cast(model)
    assert outer.casts[-1] is not outer.last.weight  # still cast after the inner model has returned
    assert model not in _weights._plans
    assert not _weights.has_casts()


def test_compile_and_trace_do_not_see_the_casts(small):
    model, x = small
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(predict(compiled, x), predict(model, x))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(model, x, check_trace=False)
    with torch.no_grad():
        model.fc.weight.mul_(2)
    assert torch.equal(traced(x), predict(model, x))
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(predict(model, x), traced(x))


def test_export_and_fx_do_not_see_the_casts():
    model, x = installed(nn.Sequential(Linear(4, 3))), torch.randn(5, 4, device=DEVICE)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)


def test_hooks_survive_deepcopy_and_pickling(small):
    model, x = small
    expected = predict(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(predict(other, x), expected)
        assert is_cast(other)
        assert set(other.state_dict()) == {"fc.weight", "fc.bias"}
        before = len(other._forward_hooks)
        other.register_forward_hook(lambda *_: None)
        assert len(other._forward_hooks) == before + 1


def test_hooks_of_a_loaded_model_keep_their_ids(small, monkeypatch):
    """PyTorch numbers hooks per process: a hook registered after loading must not take the id of a pickled one."""
    data = pickle.dumps(small[0])
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    other = pickle.loads(data)
    for _ in range(1000):
        other.register_forward_hook(lambda *_: None)
    assert len(other._forward_hooks) == 1001


def test_built_models_have_the_hook_on_the_root_alone():
    model = saccade.create_model("svit_nano", depths=(1, 1, 1, 1)).eval()
    assert [name for name, module in model.named_modules() if module._forward_pre_hooks] == [""]
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, 32, 32))
    assert traces
    features = saccade.create_model("svit_nano", features_only=True, depths=(1, 1, 1, 1)).eval()
    with torch.no_grad():
        assert len(features(torch.randn(1, 3, 32, 32))) == 4


def test_weights_are_cast_once_and_kernels_that_read_float32_keep_theirs():
    model = nn.Module()
    model.a, model.b = Linear(4, 4), Linear(4, 4)
    model.b.weight = model.a.weight
    model.conv, model.depthwise = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4)
    model.norm, model.grouped = nn.LayerNorm(4), GroupedLinear(4, 4, 2)
    plan = _weights._Plan(model.to(DEVICE), DEVICE, torch.bfloat16)
    expected = [
        model.a.weight, model.a.bias, model.b.bias, model.conv.weight, model.conv.bias, model.grouped.weight,
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
