"""`saccade.optimize`: equal outputs for every family and for timm's models; the original is unchanged."""

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import saccade
from saccade.inference.fold import ChannelAffine, fold_norms
from tests.contract.names import NANOS

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # as promised


def with_statistics(model: nn.Module) -> nn.Module:
    """Randomise statistics, gains and shifts of batch norms, as after training."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for value, low, high in (
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.5, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.5, 0.5),
            ):
                value.copy_(torch.rand(value.shape, generator=generator) * (high - low) + low)
    return model.eval()


def create(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    if name == "paca_teacher":  # the external clustering network has batch norms, PaCa itself has none
        name, options = "paca_nano", {"teacher": (1, 1, 1, 1)}
    return with_statistics(timm.create_model(name, num_classes=10, **options))


def images_of(dtype=torch.float32, size=64):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2)).to(dtype)


def difference(result, expected) -> float:
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", [*NANOS, "paca_teacher", "resnet10t", "resnet18d", "resnetv2_50"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_optimized_copy_equals_original(name, dtype):
    model, images = create(name).to(dtype), images_of(dtype, 32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(images)
    copy = saccade.optimize(model)
    assert difference(copy(images), expected) < TOLERANCE[dtype]
    assert torch.equal(model(images), expected)  # unchanged
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", [*NANOS, "resnet10t"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_copy_takes_float32_images_and_is_close(name, dtype):
    model, images = create(name), images_of()
    copy = saccade.optimize(model, dtype=dtype, memory_format=torch.channels_last)
    output = copy(images)
    assert output.dtype == dtype
    assert difference(output, model(images)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "left"), [("svit_nano", 4), ("vt_nano", 1), ("paca_nano", 0), ("resnet10t", 0), ("resnet18d", 0)]
)
def test_only_norms_next_to_no_linear_layer_remain(name, left):
    """SViT's stem: after a GELU, before zero padding. VT's projector: after attention over the tokens."""
    copy = saccade.optimize(create(name))
    remaining = [module for module in copy.modules() if isinstance(module, _BatchNorm | ChannelAffine)]
    assert len(remaining) == left


@torch.no_grad()
@pytest.mark.parametrize(
    ("backbone", "head"),
    [
        ("svit_nano", "upernet"),
        ("vt_nano", "vt_fpn"),
        ("paca_nano", "paca"),
        ("sparseformer_nano", "sparse"),
        ("resnet10t", "fpn"),
    ],
)
def test_optimized_segmenter_equals_original(backbone, head):
    torch.manual_seed(0)
    model = with_statistics(saccade.create_segmenter(backbone, head, num_classes=5)).double()
    copy = saccade.optimize(model)
    assert norms(copy) < norms(model) or norms(model) == 0
    images = images_of(torch.float64, 32)
    assert difference(copy(images), model(images)) < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("name", ["svit_nano", "vt_nano"])
def test_optimized_features_equal_original(name):
    model = with_statistics(timm.create_model(name, features_only=True)).double()
    for ours, exact in zip(
        saccade.optimize(model)(images_of(torch.float64, 32)), model(images_of(torch.float64, 32)), strict=True
    ):
        assert difference(ours, exact) < 1e-10


class Awkward(nn.Module):
    """Where folding by names would be wrong: a convolution with two readers, one called twice, shared weights."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)  # conv1 is read by the sum, too
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)  # conv2 runs twice
        self.conv3, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv4, self.norm4 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv4.weight = self.conv3.weight  # one tensor, two layers
        self.norm5, self.conv5 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)  # zero padding after the norm
        self.norm6, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 8)  # folds into the linear layer, across a permute

    def forward(self, x):
        x = self.conv1(x)
        x = x + self.norm1(x)
        x = self.conv2(self.norm2(self.conv2(x)))
        x = self.norm4(self.conv4(self.norm3(self.conv3(x)).relu()))
        x = self.conv5(self.norm5(x.relu()))
        return self.fc(self.norm6(x.relu()).permute(0, 2, 3, 1))


@torch.no_grad()
def test_folding_follows_data_flow_not_names():
    torch.manual_seed(0)
    model = with_statistics(Awkward()).double()
    copy = saccade.optimize(model)
    images = images_of(torch.float64, 9)
    assert difference(copy(images), model(images)) < 1e-10
    folded = [name for name, module in copy.named_children() if isinstance(module, nn.Identity)]
    assert folded == ["norm6"]


@torch.no_grad()
def test_frozen_batch_norm_is_folded():
    from torchvision.ops import FrozenBatchNorm2d

    torch.manual_seed(0)
    norm = FrozenBatchNorm2d(4)
    norm.running_mean.normal_()
    norm.weight.uniform_(0.5, 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm).eval()
    copy = saccade.optimize(model)
    assert isinstance(copy[1], nn.Identity)
    assert difference(copy(images_of()), model(images_of())) < 1e-5


def test_norm_in_training_mode_is_not_folded():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert fold_norms(model.train()) == 0


def test_cast_copy_keeps_coordinates_in_float32():
    copy = saccade.optimize(create("sparseformer_nano"), dtype=torch.bfloat16)
    assert copy.regions.dtype == torch.float32
    assert copy.cortex.blocks[0].tokenizer.placer.grid.dtype == torch.float32
    assert copy.cortex.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16


def test_record_works_on_an_optimized_copy():
    model, images = create("svit_nano"), images_of()
    with saccade.record(model) as expected:
        model(images)
    copy = saccade.optimize(model)
    with saccade.record(copy) as traces:
        copy(images)
    for ours, theirs in zip(traces, expected, strict=True):
        assert ours.name == theirs.name
        torch.testing.assert_close(ours.maps(), theirs.maps(), rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["svit_nano", "vt_nano"])
def test_optimized_copy_exports(name):
    copy, images = saccade.optimize(create(name), memory_format=torch.channels_last), images_of(size=32)
    program = torch.export.export(copy, (images,))
    torch.testing.assert_close(program.module()(images), copy(images))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", NANOS)
def test_optimized_copy_compiles(name):
    copy, images = saccade.optimize(create(name), memory_format=torch.channels_last), images_of()
    torch.testing.assert_close(torch.compile(copy, fullgraph=True)(images), copy(images), rtol=1e-3, atol=1e-4)


def test_unsupported_options_are_errors():
    with pytest.raises(ValueError, match=r"dtype must be one of .*torch.int8"):
        saccade.optimize(create("svit_nano"), dtype=torch.int8)
    with pytest.raises(ValueError, match="expected a model on a CUDA device, got one on cpu"):
        saccade.optimize(create("svit_nano"), cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", NANOS)
def test_cuda_graph_equals_plain_copy(name):
    model, images = create(name).cuda(), images_of().cuda()
    plain = saccade.optimize(model)
    graph = saccade.optimize(model, cuda_graph=True)
    with torch.no_grad():
        first = graph(images)
        second = graph(images.flip(0))
        torch.testing.assert_close(first, plain(images), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(second, plain(images.flip(0)), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="as captured, got"):
        graph(images[:1])
    graph.reset()
    assert graph(images[:1]).shape == (1, 10)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        graph.train()


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "head"), [("svit_nano", "mask_rcnn"), ("sparseformer_nano", "sparse")])
def test_optimized_detector_equals_original(backbone, head):
    torch.manual_seed(0)
    model = with_statistics(saccade.create_detector(backbone, head, num_classes=3, min_size=64, max_size=96)).double()
    copy = saccade.optimize(model, torch.float64)
    images = [torch.rand(3, 64, 80), torch.rand(3, 70, 64)]  # float32: cast by the copy
    for result, expected in zip(copy(images), model([image.double() for image in images]), strict=True):
        assert result.keys() == expected.keys()
        torch.testing.assert_close(result["boxes"], expected["boxes"], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(result["scores"], expected["scores"], rtol=1e-8, atol=1e-8)
        assert len(expected["boxes"]) > 0
