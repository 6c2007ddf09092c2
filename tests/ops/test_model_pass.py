"""The first pass of a model knows all kernels that it and its backward launch, and compiles them in parallel."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.ops import _launch, _model_pass
from saccade.ops._launch import record_specializations
from saccade.ops._model_pass import launched_by, model_pass, prepare_kernels
from tests.ops.compare import DEVICE, kernels_allowed, needs_triton

NAMES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano", "video_sparseformer_nano")


@needs_triton
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_fake_pass_launches_what_the_pass_launches(name, training):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=3).to(DEVICE).train(training)
    images = torch.randn(2, *((3, 8) if "video" in name else (3,)), 64, 48, device=DEVICE)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.random.get_rng_state()
    with kernels_allowed(), torch.autocast(DEVICE, torch.bfloat16), torch.set_grad_enabled(training):
        expected = launched_by(type(model).forward_features, model, (images,), {})
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert torch.equal(torch.random.get_rng_state(), generator)
        assert all(parameter.grad is None for parameter in model.parameters())
        with record_specializations(execute=False) as launched:
            logits = model(images)
            if training:
                F.cross_entropy(logits.float(), torch.zeros(2, dtype=torch.long, device=DEVICE)).backward()
    assert launched
    assert launched == expected


def test_hooks_of_a_model_do_not_see_the_fake_pass():
    outputs, model = [], saccade.create_model("svit_nano", depths=(1, 1, 1, 1)).to(DEVICE)
    model.stages[0].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    launched_by(type(model).forward_features, model, (torch.randn(1, 3, 64, 64, device=DEVICE),), {})
    assert not outputs


class Reaches(torch.autograd.Function):
    """Reaches a kernel inside an autograd function, where gradients are disabled."""

    @staticmethod
    def forward(ctx, x):
        _launch.before_first_compilation()
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


class Trains(nn.Linear):
    @model_pass
    def forward(self, x):
        return Reaches.apply(super().forward(x))


def test_a_first_kernel_inside_an_autograd_function_prepares_backward_too(monkeypatch):
    modes = []
    monkeypatch.setattr(_model_pass, "launched_by", lambda *_: modes.append(torch.is_grad_enabled()) or set())
    Trains(2, 2)(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        Trains(2, 2)(torch.ones(1, 2))
    assert modes == [True, False]


class Counts(nn.Linear):
    """Reaches two kernels that are not compiled."""

    @model_pass
    def forward(self, x):
        _launch.before_first_compilation()
        _launch.before_first_compilation()
        return super().forward(x)


def test_kernels_are_prepared_once_per_model_and_mode(monkeypatch):
    passes = []
    monkeypatch.setattr(_model_pass, "launched_by", lambda method, model, *_: passes.append(model.training) or set())
    model, x = Counts(2, 2), torch.ones(1, 2)
    for training in (True, True, False, False):
        model.train(training)(x)
    assert passes == [True, False]
    with torch.no_grad():
        model(x)
    Counts(2, 2)(x)
    assert passes == [True, False, False, True]
    prepare_kernels()  # outside of a pass
    assert len(passes) == 4


def test_a_pass_that_cannot_be_run_with_fake_tensors_goes_on():
    class Fails(Counts):
        @model_pass
        def forward(self, x):
            _launch.before_first_compilation()
            return nn.Linear.forward(self, x) * float(x.sum())  # not known of a fake tensor

    assert Fails(2, 2)(torch.ones(1, 2)).shape == (1, 2)


COMPILE = """
import triton, torch
from concurrent.futures import ThreadPoolExecutor
from triton.backends.compiler import GPUTarget
from saccade.ops import _rows
from saccade.ops._launch import KERNELS, Specialization, compile_in

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

triton.runtime.driver.set_active(Driver())
kernel = _rows._column_sum(16, 64, 8)
constants = tuple(kernel.constants.items())
with ThreadPoolExecutor(2) as threads:
    compile_in(threads, [Specialization("_column_sum_kernel", (torch.bfloat16, torch.float32), constants)])
(compiled,) = KERNELS["_column_sum_kernel"].device_caches[0][0].values()
print("ptx" in compiled.asm)
"""


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="replaces the driver, to compile without a GPU")
def test_kernels_are_compiled_in_threads_without_a_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET")
    result = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert result.stdout.strip() == "True", result.stderr


def test_without_asynchronous_compilation_nothing_is_compiled_ahead(monkeypatch):
    monkeypatch.setattr(_launch.triton, "AsyncCompileMode", None, raising=False)
    with ThreadPoolExecutor(1) as threads:
        _launch.compile_in(threads, [_launch.Specialization("unknown", (), ())])


FIRST_STEP = """
import triton, torch
from triton.backends.compiler import GPUTarget
import saccade
from saccade import ops
from saccade.ops import _launch

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

class Launched(Exception):
    pass

triton.runtime.driver.set_active(Driver())
model = saccade.create_model("sparseformer_nano", depth=1, repeats=1).train()
launch, order = _launch.Kernel.__call__, []

def stop(kernel, grid, *arguments):
    if _launch._state.record is not None:
        return launch(kernel, grid, *arguments)
    _launch.before_first_compilation()
    raise Launched

_launch.Kernel.__call__ = stop
try:
    with ops.interpreted(), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(1, 3, 64, 64))
except Launched:
    pass
print(sorted(name for name, kernel in _launch.KERNELS.items() if kernel.device_caches[0][0]))
"""


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="replaces the driver, to compile without a GPU")
def test_the_first_launch_of_a_training_step_compiles_forward_and_backward(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET")
    result = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True)
    assert {"_sample_kernel", "_sample_backward_kernel", "_mix_kernel", "_mix_backward_kernel"} <= set(
        json.loads(result.stdout.replace("'", '"'))
    ), result.stderr
