"""What compilers get of convolutions: norms folded on the way into cuDNN's fused call, stems over blocks of pixels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.library import opcheck

import saccade
from saccade.kernels import HAS_TRITON, blocks, cudnn, enabled, pool, trusted
from saccade.layers import residual
from saccade.layers.conv import ConvNormRelu
from saccade.models.resnet import LeanBasicBlock, LeanBottleneck
from tests.inference.test_optimize import with_statistics

# On a GPU machine kernels are compiled, not interpreted, and take no tensors of a CPU.
interpreted = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter; with a GPU the last test asks it"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs a GPU")
HALF = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """The road of a GPU on a CPU; cuDNN's calls are made of the library's."""

    def relu(features, weight, bias, stride, padding, dilation, groups):
        return F.relu(F.conv2d(features, weight, bias, stride, padding, dilation, groups))

    def add_relu(features, weight, shortcut, alpha, bias, stride, padding, dilation, groups):
        total = F.conv2d(features, weight, bias, stride, padding, dilation, groups).float() + alpha * shortcut
        return F.relu(total).to(features.dtype)

    monkeypatch.setattr(residual, "suits", lambda *_: True)
    monkeypatch.setattr(pool, "fits", lambda features: features.is_contiguous(memory_format=torch.channels_last))
    monkeypatch.setattr(cudnn, "available", lambda _: True)
    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)


def compiled(module: nn.Module, *args: torch.Tensor, through: bool = False) -> tuple[torch.Tensor, list]:
    """What a compiled module answers, and the operators of ours it is made of; `through` autograd of the compiler."""
    torch.compiler.reset()
    taken = []

    def look(graph: torch.fx.GraphModule, given):
        taken.extend(
            node.target.__name__.partition(".")[0] for node in graph.graph.nodes if "saccade" in str(node.target)
        )
        return aot_eager(graph, given) if through else graph

    return torch.compile(module, backend=look, fullgraph=True)(*args), taken


def down(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, width, 1, 2, bias=False), nn.BatchNorm2d(width))


BLOCKS = {
    "bottleneck": (lambda: LeanBottleneck(32, 8), 32, 3),
    "bottleneck with a shortcut": (lambda: LeanBottleneck(16, 8, 2, down(32)), 16, 3),
    "basic": (lambda: LeanBasicBlock(16, 16), 16, 2),
    "basic with a shortcut": (lambda: LeanBasicBlock(16, 24, 2, down(24)), 16, 2),
    "head": (lambda: ConvNormRelu(16, 24, 3), 16, 1),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("folded", [False, True])
def test_a_compiled_block_folds_its_norms(name, folded, gpu):
    torch.manual_seed(0)
    make, width, count = BLOCKS[name]
    block = with_statistics(make()).eval()
    x = torch.randn(2, width, 7, 6).to(HALF).contiguous(memory_format=torch.channels_last)
    exact = block.double()(x.double())
    if folded:  # the copy of saccade.optimize, cast already
        ours, taken = compiled(saccade.optimize(block.float(), HALF, torch.channels_last), x)
    else:
        with torch.autocast("cpu", HALF):
            ours, taken = compiled(block.float(), x)
    assert len(taken) == count
    assert ours.dtype == HALF
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert (ours.double() - exact).norm() < 2e-2 * exact.norm()


@torch.no_grad()
def test_what_does_not_fit_is_left_to_the_compiler(gpu):
    block = with_statistics(LeanBasicBlock(16, 16)).eval()
    x = torch.randn(2, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    assert compiled(block, x)[1] == []  # float32
    with torch.autocast("cpu", HALF):
        assert compiled(block, x)[1] == []  # a map that autocast would cast
        assert len(compiled(block, x.to(HALF))[1]) == 2
        with trusted():
            assert compiled(block, x.to(HALF))[1] == []
        with torch.enable_grad():
            assert compiled(block, x.to(HALF))[1] == []
        odd = with_statistics(LeanBasicBlock(12, 12)).eval()  # channels not in eights
        assert compiled(odd, x[:, :12].contiguous(memory_format=torch.channels_last).to(HALF))[1] == []
        assert compiled(block.train(), x.to(HALF))[1] == []


@torch.no_grad()
@pytest.mark.parametrize("shortcut", [False, True])
def test_the_operator_keeps_its_word(gpu, shortcut):
    x = torch.randn(2, 16, 6, 5).to(HALF).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(16, 16, 3, 3).to(HALF), torch.randn(16).to(HALF)
    for given in (x, x.contiguous()):
        args = given, weight, bias, (1, 1), (1, 1), (1, 1), given if shortcut else None
        opcheck(torch.ops.saccade.conv_relu.default, args, test_utils=("test_schema", "test_faketensor"))


@interpreted
@torch.no_grad()
@pytest.mark.parametrize("size", [(40, 33), (64, 64)])
def test_a_compiled_stem_pools_before_it_adds_its_bias(size, gpu):
    torch.manual_seed(0)
    stem = saccade.create_model("sparseformer_nano", num_classes=7).eval().stem
    stem.conv.bias.normal_()
    images = torch.randint(-4, 5, (2, 3, *size)).float().contiguous(memory_format=torch.channels_last)
    stem.conv.weight.copy_(torch.randint(-8, 9, stem.conv.weight.shape) / 64)  # few digits: sums are exact
    with torch.autocast("cpu", HALF):
        with trusted():
            expected, _ = compiled(stem, images)
        ours, taken = compiled(stem, images)
    assert len(taken) == 1
    assert (ours - expected).norm() < 1e-2 * expected.norm()


@interpreted
@pytest.mark.parametrize(("size", "through"), [((40, 33), False), ((24, 32), True)])
@pytest.mark.parametrize(
    ("name", "operators"), [("vt_resnet18", ["to_blocks", "pool"]), ("sparseformer_nano", ["stem_conv", "pool"])]
)
def test_a_compiled_stem_learns_the_same(name, operators, through, size, gpu):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=7).train()
    stem, conv = (Stem(model), model.conv1) if name.startswith("vt") else (model.stem, model.stem.conv)
    # Few digits: both convolutions are then exact, and pooling finds the same largest values behind them.
    images = torch.randint(-4, 5, (2, 3, *size)).float().contiguous(memory_format=torch.channels_last)
    conv.weight.data = torch.randint(-8, 9, conv.weight.shape) / 64
    weights = list(conv.parameters())

    def learn() -> tuple[list[torch.Tensor], list]:
        with torch.autocast("cpu", HALF):
            features, taken = compiled(stem, images, through=through)
        g = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(features)
        return [features.detach().float(), *torch.autograd.grad(features, weights, g)], taken

    with trusted():
        expected, taken = learn()
        assert taken == []
    ours, taken = learn()
    assert taken == operators
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() < 1e-2 * b.norm()
    for operator in () if through else operators:
        with trusted(operator):
            assert learn()[1] == [operator]


class Stem(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model.forward_stem(images)


@interpreted
def test_blocks_keep_their_word():
    images = torch.randn(2, 3, 9, 7)
    opcheck(blocks._op, (images, HALF, 12), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", ["vt_resnet18", "vt_resnet50", "sparseformer_nano"])
def test_a_compiled_model_answers_the_same_on_a_gpu(name):
    torch.manual_seed(0)
    model = with_statistics(saccade.create_model(name, num_classes=7)).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    exact = model.double()(images.double())
    model = model.float()
    torch.compiler.reset()
    with torch.autocast("cuda", HALF):
        ours, twins = torch.compile(model, fullgraph=True)(images), with_twins(model, images)
    # Fifty layers of random norms lose up to a fifth in half precision, in any order.
    assert (ours.double() - exact).norm() < 2 * (twins.double() - exact).norm() + 1e-2 * exact.norm()


def with_twins(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with enabled(False):
        return model(images)
