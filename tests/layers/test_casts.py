"""Weights cast together: the same answers from fewer launches, whatever happened to the weights before."""

import copy
from collections import Counter

import pytest
import torch
from timm.models import create_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import saccade  # noqa: F401  (registers the models)
from saccade.layers import casts
from saccade.layers.casts import CastsTogether, halved, planned
from saccade.layers.linear import Linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")


@pytest.fixture
def here(monkeypatch):
    """Cast together on the device of these tests."""
    monkeypatch.setattr(casts, "KIND", DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Small(CastsTogether):
    def __init__(self):
        super().__init__()
        self.fc = Linear(4, 3)
        self.met = []

    @property
    def seen(self):
        return self.met[-1]

    def forward(self, x):
        self.met.append(halved(self.fc.weight))
        return self.fc(x)


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Small().to(DEVICE), torch.randn(5, 4, device=DEVICE)


def answer(model, x, dtype=torch.bfloat16):
    with torch.no_grad(), torch.autocast(DEVICE, dtype):
        return model(x)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_models_answer_the_same_from_fewer_casts(name, here, monkeypatch):
    torch.manual_seed(0)
    model, images = create_model(name, num_classes=7).eval().to(DEVICE), torch.randn(2, 3, 64, 64, device=DEVICE)
    with Count() as together:
        ours = answer(model, images)
    monkeypatch.setattr(casts, "KIND", "nowhere")
    monkeypatch.setattr(casts, "casts_help", lambda model: False)
    with Count() as apart:
        plain = answer(model, images)
    assert torch.equal(ours, plain)
    assert together.calls["_foreach_copy_"] == 1
    assert together.calls["_to_copy"] < 0.85 * apart.calls["_to_copy"]


def test_a_pass_sees_every_change_of_its_weights(here, small):
    model, x = small
    answer(model, x)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)
    assert torch.equal(model.seen, model.fc.weight.bfloat16() / 2)
    assert torch.equal(answer(model, x), answer(copy.deepcopy(model), x))
    assert torch.equal(model.seen, model.fc.weight.bfloat16())
    model.fc.weight.data = model.fc.weight.data * 3
    answer(model, x)
    assert torch.equal(model.seen, model.fc.weight.bfloat16())


def test_a_new_weight_is_not_found_and_another_type_is_planned_anew(here, small):
    model, x = small
    answer(model, x)
    model.fc.weight = nn.Parameter(torch.ones(3, 4, device=DEVICE))
    assert torch.equal(answer(model, x), answer(nn.Sequential(model.fc), x))
    assert model.seen is model.fc.weight
    answer(model, x, torch.float16)
    assert model.seen.dtype == torch.float16
    model.bfloat16()
    answer(model, x)
    assert model.seen is model.fc.weight  # only float32 is cast


def test_nothing_is_left_behind_a_pass_that_fails(here, small):
    model, x = small
    with pytest.raises(RuntimeError):
        answer(model, x[:, :2])
    assert halved(model.fc.weight) is model.fc.weight


def test_who_learns_gets_the_memory_back(here, small):
    model, x = small
    answer(model, x)
    assert model in casts._plans
    with torch.autocast(DEVICE, torch.bfloat16):
        model(x).float().sum().backward()
    assert model not in casts._plans
    assert model.seen is model.fc.weight
    assert model.fc.weight.grad is not None


def test_without_autocast_nothing_is_cast(here, small):
    model, x = small
    with torch.no_grad():
        model(x)
    assert model.seen is model.fc.weight


def test_who_learns_inside_a_pass_meets_the_weight_itself(here):
    class Learns(Small):
        def forward(self, x):
            with torch.enable_grad():
                return super().forward(x)

    model = Learns().to(DEVICE)
    answer(model, torch.randn(5, 4, device=DEVICE)).float().sum().backward()
    assert model.seen is model.fc.weight
    assert model.fc.weight.grad is not None


def test_in_inference_mode_and_behind_it(here, small):
    model, x = small
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        first = model(x)
    assert torch.equal(first, answer(model, x))


def test_compilers_and_tracers_do_not_see_it(here, small):
    model, x = small
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(answer(compiled, x), answer(model, x))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(model, x, check_trace=False)
    with torch.no_grad():
        model.fc.weight.mul_(2)
    assert torch.equal(traced(x), answer(model, x))
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(answer(model, x), traced(x))


def test_shared_weights_are_cast_once_and_kernels_keep_theirs(here):
    model = nn.Module()
    model.a, model.b = Linear(4, 4), Linear(4, 4)
    model.b.weight = model.a.weight
    model.conv, model.depthwise = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4)
    model.norm = nn.LayerNorm(4)
    plan = planned(model.to(DEVICE), torch.bfloat16)
    wanted = [model.a.weight, model.a.bias, model.b.bias, model.conv.weight, model.conv.bias]
    assert [id(weight) for weight in plan.weights] == [id(weight) for weight in wanted]
