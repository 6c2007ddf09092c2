"""Convolutions with what follows them against their references, and which implementation is chosen."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import DropPath
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from saccade import ops
from saccade.layers.norm import ChannelAffine
from saccade.ops import _dispatch, _weights, conv
from saccade.ops._launch import record_specializations
from tests.ops.compare import DEVICE, HALF, check, kernels_allowed, needs_triton, randn, relative_error
from tests.ops.layers import conv_of, eval_norm

pytestmark = needs_triton


def channels_last(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed).contiguous(memory_format=torch.channels_last)


def affine(channels: int) -> ChannelAffine:
    return ChannelAffine(randn(channels, seed=1), randn(channels, seed=2), axes=2).eval()


def compare(op, implementation, features, *layers, tolerance=1e-5, **options):
    """Inference by the operation against its reference in float64."""
    layers = [layer.to(DEVICE) for layer in layers]
    with torch.no_grad(), kernels_allowed():
        assert op.implementation(features, *layers, **options) == implementation
        y = op(features.clone(memory_format=torch.preserve_format), *layers, **options)
        doubled = [copy.deepcopy(layer).double() for layer in layers]
        options = {
            key: value.double() if isinstance(value, Tensor)
            else copy.deepcopy(value).double() if isinstance(value, nn.Module) else value
            for key, value in options.items()
        }  # fmt: skip
        expected = op.reference(features.double(), *doubled, **options)
    assert y.dtype == features.dtype
    assert y.shape == expected.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(y, expected) <= tolerance


NORMS = {"norm": eval_norm, "affine": affine, "folded": lambda channels: nn.Identity()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (1, 3, 1, 1)])
def test_conv_matches_reference_in_inference(bias, shape):
    layer = nn.Conv2d(shape[1], 12, 3, padding=1, bias=bias)
    compare(conv.conv, "epilogue" if bias else "reference", channels_last(*shape), layer)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", ["", "relu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (1, 3, 1, 1)])
def test_conv_norm_act_computes_gelu_before_the_norm(norm, act, bias, shape):
    layer = nn.Conv2d(shape[1], 12, 3, padding=1, bias=bias)
    compare(conv.conv_norm_act, "epilogue", channels_last(*shape), layer, NORMS[norm](12), act=act, pre_act="gelu")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", ["", "relu"])
@pytest.mark.parametrize("shortcut", ["", "features", "norm", "affine", "folded"])
@pytest.mark.parametrize("bias", [False, True])
def test_conv_norm_act_matches_reference_in_inference(norm, act, shortcut, bias):
    options = {}
    if shortcut:
        options["shortcut"] = channels_last(2, 12, 5, 6, seed=3)
    if shortcut in NORMS:
        options["shortcut_layers"] = nn.Sequential(nn.Conv2d(12, 12, 1, bias=bias), NORMS[shortcut](12)).to(DEVICE)
    layer = nn.Conv2d(8, 12, 3, padding=1, bias=bias)
    compare(conv.conv_norm_act, "epilogue", channels_last(2, 8, 5, 6), layer, NORMS[norm](12), act=act, **options)


def test_epilogue_matches_reference_in_half_precision():
    layer = nn.Conv2d(8, 40, 1).to(HALF)
    features, shortcut = channels_last(2, 8, 9, 7, dtype=HALF), channels_last(2, 40, 9, 7, dtype=HALF)
    for options in ({"act": "relu", "shortcut": shortcut}, {"pre_act": "gelu"}):
        compare(conv.conv_norm_act, "epilogue", features, layer, eval_norm(40), tolerance=1e-2, **options)


def test_epilogue_accepts_contiguous_features_and_an_empty_batch():
    layer, norm = nn.Conv2d(8, 12, 1).to(DEVICE), eval_norm(12).to(DEVICE)
    compare(conv.conv_norm_act, "epilogue", randn(2, 8, 5, 6), layer, norm, act="relu", shortcut=randn(2, 12, 5, 6))
    with torch.no_grad(), kernels_allowed():
        assert conv.conv_norm_act(randn(0, 8, 5, 6), layer, norm, "relu").shape == (0, 12, 5, 6)


def test_epilogue_propagates_nan():
    layer, norm = nn.Conv2d(8, 12, 1).to(DEVICE), eval_norm(12).to(DEVICE)
    features = channels_last(1, 8, 2, 2)
    features[0, 0, 1, 1] = float("nan")
    with torch.no_grad(), kernels_allowed():
        y = conv.conv_norm_act(features, layer, norm, "relu")
    assert y[0, :, 1, 1].isnan().all()
    assert y[0, :, 0].isfinite().all()


def test_epilogue_compiles_one_kernel_for_all_sizes():
    layers = [(nn.Conv2d(8, channels, 1).to(DEVICE), eval_norm(channels).to(DEVICE)) for channels in (128, 256, 512)]
    with torch.no_grad(), kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 30):
            conv.conv_norm_act(channels_last(size % 3 + 1, 8, size, 40 - size), *layers[size % 3], "relu")
    assert len(compiled) == 1


class Training:
    """An operation on a convolution and a BatchNorm in training, as a function of tensors."""

    def __init__(self, op, *, shortcut_conv=False, **options):
        self.op, self.shortcut_conv, self.options = op, shortcut_conv, options

    def arguments(self, features, weight, *shortcut):
        norm = nn.BatchNorm2d(weight.shape[0]).to(features).train()
        options = dict(self.options)
        if shortcut:
            options["shortcut"] = shortcut[0]
        if self.shortcut_conv:
            shortcut_norm = nn.BatchNorm2d(weight.shape[0]).to(features).train()
            options["shortcut_layers"] = nn.Sequential(conv_of(shortcut[1]), shortcut_norm)
        return (features, conv_of(weight, padding=1), norm), options

    def implementation(self, *inputs):
        arguments, options = self.arguments(*inputs)
        return self.op.implementation(*arguments, **options)

    def __call__(self, *inputs):
        arguments, options = self.arguments(*inputs)
        return self.op(*arguments, **options)

    def reference(self, *inputs):
        arguments, options = self.arguments(*inputs)
        return self.op.reference(*arguments, **options)


@pytest.mark.parametrize("case", ["plain", "shortcut", "shortcut convolution"])
def test_conv_norm_act_matches_reference_in_training(case):
    inputs = [channels_last(2, 8, 5, 6), randn(12, 8, 3, 3)]
    if case != "plain":
        inputs += [channels_last(2, 12, 5, 6, seed=2)]
    if case == "shortcut convolution":
        inputs += [randn(12, 12, 1, 1)]
    op = Training(conv.conv_norm_act, shortcut_conv=case == "shortcut convolution", act="relu")
    check(op, *inputs, implementation="composed", tolerance=1e-4)


def test_conv_norm_act_computes_gelu_before_the_norm_in_training():
    inputs = channels_last(2, 8, 5, 6), randn(12, 8, 3, 3)
    check(Training(conv.conv_norm_act, pre_act="gelu"), *inputs, implementation="composed", tolerance=1e-4)


def test_conv_norm_act_drops_paths_between_norm_and_sum():
    layer, norm, features = nn.Conv2d(8, 8, 1).to(DEVICE), nn.BatchNorm2d(8).to(DEVICE), channels_last(4, 8, 3, 3)
    with kernels_allowed():
        dropped = conv.conv_norm_act(features, layer, norm, "relu", features, None, DropPath(1 - 1e-7).train())
        torch.testing.assert_close(dropped, F.relu(features))
        output = conv.conv_norm_act(features, layer, norm.eval(), "relu", features, None, DropPath(0.5).eval())
        torch.testing.assert_close(output, F.relu(norm(layer(features)) + features), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            arguments = features, layer, norm, "relu", features, None
            assert conv.conv_norm_act.implementation(*arguments, DropPath(0.5).eval()) == "epilogue"
            assert conv.conv_norm_act.implementation(*arguments, DropPath(0.5).train()) == "reference"


@torch.no_grad()
def test_conv_norm_act_uses_reference_where_layers_have_hooks_or_other_types():
    features, layer, norm = channels_last(2, 8, 5, 6), nn.Conv2d(8, 8, 1).to(DEVICE), eval_norm(8).to(DEVICE)
    hooked = copy.deepcopy(layer)
    hooked.register_forward_hook(lambda *_: None)
    shortcut = nn.Sequential(copy.deepcopy(layer), copy.deepcopy(norm))
    implementation = conv.conv_norm_act.implementation
    with kernels_allowed():
        assert implementation(features, layer, norm, "relu", features, shortcut) == "epilogue"
        assert implementation(features, hooked, norm, "relu") == "reference"
        assert implementation(features, layer, copy.deepcopy(norm).train(), "relu") == "reference"
        assert implementation(features, layer, nn.GroupNorm(2, 8), "relu") == "reference"
        assert implementation(features, layer, nn.BatchNorm2d(8, affine=False).eval()) == "reference"
        assert implementation(features, nn.Sequential(layer), norm, "relu") == "reference"
        assert implementation(features, layer, norm, "silu") == "reference"
        three = nn.Sequential(nn.AvgPool2d(1), *shortcut)
        assert implementation(features, layer, norm, "relu", features, three) == "reference"
        shortcut.register_forward_hook(lambda *_: None)
        assert implementation(features, layer, norm, "relu", features, shortcut) == "reference"
        with ops.enabled(False):
            assert implementation(features, layer, norm, "relu") == "reference"


def test_shortcut_hooks_are_called_in_training_and_inference():
    features, layer = channels_last(2, 8, 5, 6), nn.Conv2d(8, 8, 1).to(DEVICE)
    shortcut, calls = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)).to(DEVICE), []
    shortcut.register_forward_hook(lambda *_: calls.append(1))
    with kernels_allowed():
        conv.conv_norm_act(features, layer, nn.BatchNorm2d(8).to(DEVICE), "relu", features, shortcut)
        with torch.no_grad():
            conv.conv_norm_act(features, layer, eval_norm(8).to(DEVICE), "relu", features, shortcut.eval())
    assert calls == [1, 1]


# cuDNN: decisions and shapes are checked with fake tensors of a GPU; its numbers need one.


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(_dispatch, "HAS_CUDNN", True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def gpu_features(channels: int = 16, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(2, channels, 7, 6, dtype=dtype, device="cuda", memory_format=torch.channels_last)


@torch.no_grad()
def test_cudnn_applies_to_half_precision_and_channels_in_eights(fake_gpu, monkeypatch):
    layer = nn.Conv2d(16, 16, 3, padding=1, device="cuda", dtype=torch.bfloat16)
    assert conv._can_use_cudnn(gpu_features(), layer)
    assert not conv._can_use_cudnn(gpu_features(12), nn.Conv2d(12, 16, 1))
    assert not conv._can_use_cudnn(gpu_features(), nn.Conv2d(16, 12, 1))
    assert not conv._can_use_cudnn(gpu_features(), nn.Conv2d(16, 16, 1, groups=2))
    assert not conv._can_use_cudnn(gpu_features(), nn.Conv2d(16, 16, 3, padding="same"))
    assert not conv._can_use_cudnn(gpu_features(), nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"))
    assert not conv._can_use_cudnn(gpu_features().cpu(), layer)
    with torch.backends.cudnn.flags(enabled=False):
        assert not conv._can_use_cudnn(gpu_features(), layer)
    monkeypatch.setattr(conv, "MAX_CUDNN_SIZE", 16 * 2 * 7 * 6)
    assert not conv._can_use_cudnn(gpu_features(), layer)


@torch.no_grad()
def test_cudnn_ends_eager_convolutions_whose_norm_is_folded(fake_gpu):
    def implementation(layer, shortcut=None, layers=None, norm=None, act="relu"):
        return conv.conv_norm_act.implementation(gpu_features(), layer, norm or nn.Identity(), act, shortcut, layers)

    layer = nn.Conv2d(16, 16, 3, padding=1, device="cuda", dtype=torch.bfloat16)
    assert implementation(layer) == implementation(layer, gpu_features()) == "cudnn"
    assert implementation(layer, gpu_features(), nn.Sequential(layer, nn.Identity())) == "cudnn"
    assert implementation(layer, act="") == "epilogue"
    assert implementation(layer, norm=eval_norm(16)) == "epilogue"
    assert implementation(layer, gpu_features(), nn.Sequential(layer, eval_norm(16))) == "epilogue"
    assert implementation(nn.Conv2d(16, 16, 3, padding=1, device="cuda")) == "epilogue"
    assert implementation(layer, gpu_features().contiguous()) == "epilogue"
    assert implementation(layer, gpu_features().float()) == "epilogue"
    with torch.enable_grad():
        assert implementation(layer) == "composed"
    layer.register_forward_hook(lambda *_: None)
    assert implementation(layer) == "reference"


@torch.no_grad()
@pytest.mark.parametrize("shortcut", [False, True])
def test_cudnn_convolutions_have_fake_implementations(fake_gpu, shortcut):
    layer = nn.Conv2d(16, 24, 3, stride=2, padding=1, device="cuda", dtype=torch.bfloat16)
    other = torch.empty(2, 24, 4, 3, dtype=torch.bfloat16, device="cuda") if shortcut else None
    y = conv._cudnn_conv_relu(gpu_features().contiguous(), layer.weight, layer.bias, layer, other)
    assert (y.shape, y.dtype) == ((2, 24, 4, 3), torch.bfloat16)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_inductor_keeps_the_strides_of_cudnn_inputs(fake_gpu):
    from torch._inductor import lowering

    layer = nn.Conv2d(16, 24, 1, device="cuda", dtype=torch.bfloat16)
    conv._cudnn_conv_relu(gpu_features(), layer.weight, layer.bias, layer, None)
    assert torch.ops.aten.cudnn_convolution_relu.default in lowering.lowerings
    assert torch.ops.aten.cudnn_convolution_relu.default in lowering._maybe_layout_constraints


@torch.no_grad()
@pytest.mark.parametrize("shortcut", ["", "features", "layers"])
@pytest.mark.parametrize("norm", NORMS)
def test_folded_norms_match_reference(monkeypatch, norm, shortcut):
    """The arithmetic around cuDNN's call, which is replaced by its definition."""

    def conv_relu(features, weight, bias, layer, shortcut):
        y = F.conv2d(features, weight, bias, layer.stride, layer.padding, layer.dilation)
        return F.relu(y if shortcut is None else y + shortcut)

    monkeypatch.setattr(conv, "_cudnn_conv_relu", conv_relu)
    layer, features = nn.Conv2d(8, 8, 3, padding=1), torch.randn(2, 8, 5, 6)
    layers = nn.Sequential(nn.Conv2d(8, 8, 1), eval_norm(8, seed=1)) if shortcut == "layers" else None
    arguments = features, layer, NORMS[norm](8).cpu(), "relu", features if shortcut else None, layers
    expected = conv.conv_norm_act.reference(*arguments)
    torch.testing.assert_close(conv._conv_norm_act_cudnn(*arguments), expected, rtol=1e-5, atol=1e-5)


def operators(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[str]]:
    """Output of the compiled module, and the fused operators in its graph."""
    torch.compiler.reset()
    names = []

    def backend(graph: torch.fx.GraphModule, example_inputs):
        targets = [str(node.target) for node in graph.graph.nodes]
        names.extend(name.split(".")[1] for name in targets if name.startswith("saccade") or "cudnn" in name)
        return aot_eager(graph, example_inputs)

    return torch.compile(module, backend=backend, fullgraph=True)(*inputs), names


class Block(nn.Module):
    def __init__(self, op, *layers: nn.Module, **options):
        super().__init__()
        self.op, self.layers, self.options = op, nn.ModuleList(layers), options

    def forward(self, features: Tensor) -> Tensor:
        return self.op(features, *self.layers, **self.options)


@pytest.mark.skipif(DEVICE == "cuda", reason="decisions on a CPU; a GPU test compares models")
@torch.no_grad()
def test_compiled_inference_folds_norms_into_cudnn(monkeypatch):
    monkeypatch.setattr(_dispatch, "can_use_cudnn", lambda features: True)
    decided = []

    def supports(*args, **kwargs):
        decided.append(conv._folds_into_cudnn(*args, **kwargs))
        return False

    monkeypatch.setattr(conv.conv_norm_act, "fused", [("cudnn", supports, conv._conv_norm_act_cudnn)])
    features = torch.randn(2, 16, 5, 5).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    block = Block(conv.conv_norm_act, nn.Conv2d(16, 16, 1, bias=False), eval_norm(16), act="relu")

    def decision(features=features, block=block):
        decided.clear()
        torch.compile(block, backend="eager", fullgraph=True)(features)
        torch.compiler.reset()
        return decided

    with kernels_allowed(), torch.autocast("cpu", torch.bfloat16):
        assert decision() == [True]
        assert decision(features.float()) == [False]
        assert decision(block=Block(conv.conv_norm_act, nn.Conv2d(16, 16, 1), eval_norm(16), act="")) == [False]
        assert decision(block=Block(conv.conv_norm_act, nn.Conv2d(16, 12, 1), eval_norm(12), act="relu")) == [False]
        with torch.enable_grad():
            assert decision() == [False]
        with ops.enabled(False):
            assert decision() == []


# The first convolution, 3x3 of stride 2.


class FirstConv:
    """`conv` of a first convolution as a function of tensors; the images get no gradient."""

    def layer(self, weight, bias):
        return conv_of(weight, bias, stride=2, padding=1)

    def implementation(self, images, weight, bias):
        return conv.conv.implementation(images.detach(), self.layer(weight, bias))

    def __call__(self, images, weight, bias):
        return conv.conv(images.detach(), self.layer(weight, bias))

    def reference(self, images, weight, bias):
        return conv.conv.reference(images.detach(), self.layer(weight, bias))


@pytest.mark.parametrize("size", [(2, 18, 11), (1, 1, 1), (1, 7, 40)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("out", [32, 20])
def test_first_conv_matches_reference(size, layout, out):
    batch, height, width = size
    images = randn(batch, 3, height, width, dtype=HALF).contiguous(memory_format=layout)
    weight = randn(out, 3, 3, 3, dtype=HALF).contiguous(memory_format=layout)
    check(FirstConv(), images, weight, randn(out, dtype=HALF))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pre_act", ["", "gelu"])
def test_first_conv_computes_gelu_and_norm_in_inference(norm, pre_act):
    layer = nn.Conv2d(3, 24, 3, stride=2, padding=1).to(HALF)
    images = channels_last(2, 3, 17, 12, dtype=HALF)
    compare(conv.conv_norm_act, "triton", images, layer, NORMS[norm](24), pre_act=pre_act, tolerance=1e-2)


def test_first_conv_of_an_empty_batch_is_empty():
    layer = nn.Conv2d(3, 24, 3, stride=2, padding=1).to(DEVICE, HALF)
    with kernels_allowed():
        assert conv.conv(randn(0, 3, 9, 9, dtype=HALF), layer).shape == (0, 24, 5, 5)


def test_first_conv_uses_other_implementations_for_other_convolutions():
    images = randn(2, 3, 9, 9, dtype=HALF)
    usual = nn.Conv2d(3, 24, 3, stride=2, padding=1).to(DEVICE, HALF)
    implementation = conv.conv.implementation
    layers = [
        nn.Conv2d(3, 24, 3, stride=1, padding=1),
        nn.Conv2d(3, 24, 3, stride=2),
        nn.Conv2d(3, 24, 5, stride=2, padding=1),
        nn.Conv2d(3, 24, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(3, 24, 3, stride=2, padding=1, dilation=2),
        nn.Conv2d(3, 24, 3, stride=2, padding=1, groups=3),
        nn.Conv2d(3, 24, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 72, 3, stride=2, padding=1),
        nn.Conv2d(4, 24, 3, stride=2, padding=1),
    ]
    with kernels_allowed():
        assert implementation(images, usual) == "triton"
        assert [implementation(images, layer.to(DEVICE, HALF)) for layer in layers] == ["reference"] * 9
        assert implementation(images.float(), usual) == "reference"
        assert implementation(images.requires_grad_(), usual) == "reference"
        images = images.detach()
        with torch.no_grad():
            assert implementation(images, layers[0]) == "epilogue"
        with torch.autocast(DEVICE, HALF):
            assert implementation(images.float(), copy.deepcopy(usual).float()) == "triton"
        usual.register_forward_hook(lambda *_: None)
        assert implementation(images, usual) == "reference"


# The stem of ResNets, 7x7 of stride 2, over blocks of pixels.


def to_blocks_reference(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """images (B, 3, H, W) -> blocks (B, channels, H/2 + 3, W/2 + 3); block j has the pixels 2 j - 4 and 2 j - 3."""
    height, width = images.shape[2:]
    padded = F.pad(images, (4, 2 + width % 2, 4, 2 + height % 2, 0, channels // 4 - 3))
    blocks = F.pixel_unshuffle(padded, 2).unflatten(1, (-1, 4))  # (B, colours, 4, ...)
    return blocks.transpose(1, 2).flatten(1, 2).to(dtype).contiguous(memory_format=torch.channels_last)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from((12, 16)))
def test_convolution_over_blocks_is_the_convolution_over_pixels(height, width, channels):
    images = torch.randn(2, 3, height, width, dtype=torch.float64)
    weight = torch.randn(5, 3, 7, 7, dtype=torch.float64, requires_grad=True)
    over_blocks = conv.block_weight(weight, torch.float64, channels)
    assert over_blocks.shape == (5, channels, 4, 4)
    assert over_blocks.is_contiguous(memory_format=torch.channels_last)
    y = F.conv2d(to_blocks_reference(images, torch.float64, channels), over_blocks)
    expected = F.conv2d(images, weight, stride=2, padding=3)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, weight, g)[0] for value in (y, expected)))


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (1, 1), (3, 150)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("channels", [12, 16])
def test_to_blocks_matches_reference(size, layout, dtype, channels):
    images = randn(2, 3, *size).contiguous(memory_format=layout)
    blocks = conv.to_blocks(images, dtype, channels)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(blocks, to_blocks_reference(images, dtype, channels))


class StemConv:
    """`conv` of a stem as a function of tensors; the images get no gradient."""

    def layer(self, weight, bias):
        return conv_of(weight, bias, stride=2, padding=3)

    def implementation(self, images, weight, bias):
        return conv.conv.implementation(images.detach(), self.layer(weight, bias))

    def __call__(self, images, weight, bias):
        return conv.conv(images.detach(), self.layer(weight, bias))

    def reference(self, images, weight, bias):
        return conv.conv.reference(images.detach(), self.layer(weight, bias))


@pytest.mark.parametrize("size", [(2, 18, 11), (1, 5, 41)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("out", [20, 64, 96])
def test_stem_conv_matches_reference(size, layout, out):
    batch, height, width = size
    images = randn(batch, 3, height, width, dtype=HALF).contiguous(memory_format=layout)
    inputs = images, randn(out, 3, 7, 7, dtype=HALF) / 10, randn(out, dtype=HALF)
    check(StemConv(), *inputs, implementation="blocks")


@pytest.mark.parametrize("out", [20, 64])
def test_stem_conv_casts_to_the_autocast_dtype(out):
    dtype = torch.bfloat16
    images, weight = randn(2, 3, 13, 9), (randn(out, 3, 7, 7) / 10).requires_grad_()
    with kernels_allowed(), torch.autocast(DEVICE, dtype):
        y = StemConv()(images, weight, None)
        g_weight = torch.autograd.grad(y, weight, randn(*y.shape).to(dtype))[0]
    assert (y.dtype, g_weight.dtype) == (dtype, torch.float32)
    assert relative_error(y.detach(), F.conv2d(images, weight.detach(), stride=2, padding=3)) < 1e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_stem_conv_recomputed_in_backward_has_the_same_gradient(reentrant):
    images, gradients = randn(2, 3, 13, 9, dtype=HALF), []
    for run in (lambda *args: checkpoint(StemConv(), *args, use_reentrant=reentrant), StemConv()):
        weight = randn(20, 3, 7, 7, dtype=HALF).requires_grad_()
        with kernels_allowed():
            run(images, weight, None).square().sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


@torch.no_grad()
def test_stem_weight_over_blocks_is_cached_for_frozen_weights(monkeypatch):
    layer = nn.Conv2d(3, 20, 7, 2, 3, bias=False).to(DEVICE, HALF).requires_grad_(False)
    images, built, build = randn(1, 3, 9, 9, dtype=HALF), [], conv.block_weight
    monkeypatch.setattr(conv, "block_weight", lambda *args: built.append(1) or build(*args))
    with kernels_allowed():
        conv.conv(images, layer)
        conv.conv(images, layer)
        assert len(built) == 2
        _weights.freeze_weights([layer.weight])
        conv.conv(images, layer)
        conv.conv(images, layer)
        assert len(built) == 3
        layer.weight.mul_(2)
        torch.testing.assert_close(conv.conv(images, layer), layer(images), rtol=1e-2, atol=1e-2)


def test_stem_conv_uses_reference_for_other_convolutions():
    images = randn(2, 3, 9, 9, dtype=HALF)
    layers = [
        nn.Conv2d(3, 8, 7, 2, 3, padding_mode="reflect"),
        nn.Conv2d(3, 8, 7, 2, 2),
        nn.Conv2d(3, 8, 7, 1, 3),
        nn.Conv2d(3, 8, 5, 2, 2),
        nn.Conv2d(3, 9, 7, 2, 3, groups=3),
        nn.Conv2d(3, 8, 7, 2, 3, dilation=2),
        nn.Conv2d(4, 8, 7, 2, 3),
    ]
    usual, implementation = nn.Conv2d(3, 8, 7, 2, 3).to(HALF), conv.conv.implementation
    with kernels_allowed():
        assert implementation(images, usual) == "blocks"
        assert [implementation(images, layer.to(DEVICE, HALF)) for layer in layers] == ["reference"] * 7
        assert implementation(images.float(), copy.deepcopy(usual).float()) == "reference"
        assert implementation(images, copy.deepcopy(usual).float()) == "reference"
        assert implementation(images.requires_grad_(), usual) == "reference"


def test_stems_compile_the_same_kernels_for_all_sizes():
    first = nn.Conv2d(3, 32, 3, stride=2, padding=1).to(DEVICE, HALF)
    stem = nn.Conv2d(3, 64, 7, stride=2, padding=3).to(DEVICE, HALF)
    with torch.no_grad(), kernels_allowed(), record_specializations(execute=False) as compiled:
        for size in range(1, 60):
            images = torch.zeros(size % 3, 3, size, 70 - size, dtype=HALF, device=DEVICE)
            conv.conv(images, first)
            conv.conv(images, stem)
    assert len(compiled) == 3  # and the bias of the second


@pytest.mark.slow
def test_conv_operators_are_consistent():
    images, weight = randn(2, 3, 9, 7), randn(8, 3, 7, 7).requires_grad_()
    opcheck(conv._stem_conv.operator, (images, weight, torch.float32))
    opcheck(conv.to_blocks.operator, (images, HALF, 12))
    weight, bias = randn(8, 3, 3, 3).requires_grad_(), randn(8).requires_grad_()
    opcheck(conv._first_conv.operator, (images, weight, bias, torch.float32, False, None, None, None, None, 0.0))
    fixed = randn(8), randn(8), randn(8), randn(8).square()
    arguments = images, weight.detach(), bias.detach(), torch.float32, True, *fixed, 1e-5
    opcheck(conv._first_conv.operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("operator", ["first_conv", "stem_conv"])
def test_compiled_training_of_stems_uses_their_operators(operator):
    layer = nn.Conv2d(3, 8, 3, 2, 1) if operator == "first_conv" else nn.Conv2d(3, 8, 7, 2, 3)
    layer, images = layer.to(DEVICE, HALF), randn(2, 3, 9, 7, dtype=HALF)
    with kernels_allowed():
        y, names = operators(Block(conv.conv, layer), images)
        assert names == [operator]
        torch.testing.assert_close(y, layer(images), rtol=1e-2, atol=1e-2)
        y.sum().backward()
    assert layer.weight.grad is not None
