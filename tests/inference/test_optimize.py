"""The inference copy gives the original's answer, for every family and for timm's, and leaves the original alone."""

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import saccade
from saccade.inference.fold import ChannelAffine, fold_norms
from tests.contract.names import NANOS

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # as promised


def lived_in(model: nn.Module) -> nn.Module:
    """As after training: statistics, gains and shifts that are not those of a fresh norm."""
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


def fresh(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    if name == "paca_teacher":  # the external clustering network has batch norms, PaCa itself has none
        name, options = "paca_nano", {"teacher": (1, 1, 1, 1)}
    return lived_in(timm.create_model(name, num_classes=10, **options))


def pictures(dtype=torch.float32, size=64):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2)).to(dtype)


def difference(found, expected) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", [*NANOS, "paca_teacher", "resnet10t", "resnet18d", "resnetv2_50"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_copy_answers_as_the_original(name, dtype):
    model, images = fresh(name).to(dtype), pictures(dtype, 32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(images)
    copy = saccade.optimize(model)
    assert difference(copy(images), expected) < TOLERANCE[dtype]
    assert torch.equal(model(images), expected)  # untouched
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", [*NANOS, "resnet10t"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_copy_takes_float32_images_and_stays_close(name, dtype):
    model, images = fresh(name), pictures()
    copy = saccade.optimize(model, dtype=dtype, memory_format=torch.channels_last)
    answer = copy(images)
    assert answer.dtype == dtype
    assert difference(answer, model(images)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "left"), [("svit_nano", 4), ("vt_nano", 1), ("paca_nano", 0), ("resnet10t", 0), ("resnet18d", 0)]
)
def test_only_norms_that_no_layer_can_take_remain(name, left):
    """SViT's stem: behind a GELU, before zeros are padded. VT's projector: behind nothing but the tokens."""
    copy = saccade.optimize(fresh(name))
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
def test_segmenters(backbone, head):
    torch.manual_seed(0)
    model = lived_in(saccade.create_segmenter(backbone, head, num_classes=5)).double()
    copy = saccade.optimize(model)
    assert norms(copy) < norms(model) or norms(model) == 0
    images = pictures(torch.float64, 32)
    assert difference(copy(images), model(images)) < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("name", ["svit_nano", "vt_nano"])
def test_feature_maps_of_the_copy(name):
    model = lived_in(timm.create_model(name, features_only=True)).double()
    for ours, exact in zip(
        saccade.optimize(model)(pictures(torch.float64, 32)), model(pictures(torch.float64, 32)), strict=True
    ):
        assert difference(ours, exact) < 1e-10


class Awkward(nn.Module):
    """Where folding by names would go wrong: a convolution read twice, one called twice, shared weights."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)  # conv1 is read by the sum, too
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)  # conv2 runs twice
        self.conv3, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv4, self.norm4 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv4.weight = self.conv3.weight  # one tensor, two layers
        self.norm5, self.conv5 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)  # zeros are padded behind the norm
        self.norm6, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 8)  # foldable forward, over a permute

    def forward(self, x):
        x = self.conv1(x)
        x = x + self.norm1(x)
        x = self.conv2(self.norm2(self.conv2(x)))
        x = self.norm4(self.conv4(self.norm3(self.conv3(x)).relu()))
        x = self.conv5(self.norm5(x.relu()))
        return self.fc(self.norm6(x.relu()).permute(0, 2, 3, 1))


@torch.no_grad()
def test_the_flow_of_data_decides_not_the_names():
    torch.manual_seed(0)
    model = lived_in(Awkward()).double()
    copy = saccade.optimize(model)
    images = pictures(torch.float64, 9)
    assert difference(copy(images), model(images)) < 1e-10
    folded = [name for name, module in copy.named_children() if isinstance(module, nn.Identity)]
    assert folded == ["norm6"]


@torch.no_grad()
def test_a_frozen_norm_folds_too():
    from torchvision.ops import FrozenBatchNorm2d

    torch.manual_seed(0)
    norm = FrozenBatchNorm2d(4)
    norm.running_mean.normal_()
    norm.weight.uniform_(0.5, 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm).eval()
    copy = saccade.optimize(model)
    assert isinstance(copy[1], nn.Identity)
    assert difference(copy(pictures()), model(pictures())) < 1e-5


def test_a_norm_in_training_mode_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert fold_norms(model.train()) == 0


def test_coordinates_stay_precise_in_a_cast_copy():
    copy = saccade.optimize(fresh("sparseformer_nano"), dtype=torch.bfloat16)
    assert copy.regions.dtype == torch.float32
    assert copy.cortex.blocks[0].look.placer.grid.dtype == torch.float32
    assert copy.cortex.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16


def test_the_copy_is_recorded_like_any_model():
    model, images = fresh("svit_nano"), pictures()
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
def test_the_copy_exports(name):
    copy, images = saccade.optimize(fresh(name), memory_format=torch.channels_last), pictures(size=32)
    program = torch.export.export(copy, (images,))
    torch.testing.assert_close(program.module()(images), copy(images))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", NANOS)
def test_the_copy_compiles(name):
    copy, images = saccade.optimize(fresh(name), memory_format=torch.channels_last), pictures()
    torch.testing.assert_close(torch.compile(copy, fullgraph=True)(images), copy(images), rtol=1e-3, atol=1e-4)


def test_wrong_wishes_are_named():
    with pytest.raises(ValueError, match=r"dtype must be one of .*torch.int8"):
        saccade.optimize(fresh("svit_nano"), dtype=torch.int8)
    with pytest.raises(ValueError, match="needs a model on a CUDA device, this one is on cpu"):
        saccade.optimize(fresh("svit_nano"), cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", NANOS)
def test_a_cuda_graph_replays_the_model(name):
    model, images = fresh(name).cuda(), pictures().cuda()
    plain = saccade.optimize(model)
    graph = saccade.optimize(model, cuda_graph=True)
    with torch.no_grad():
        first = graph(images)
        second = graph(images.flip(0))
        torch.testing.assert_close(first, plain(images), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(second, plain(images.flip(0)), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="was recorded for"):
        graph(images[:1])
    graph.reset()
    assert graph(images[:1]).shape == (1, 10)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        graph.train()


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "head"), [("svit_nano", "mask_rcnn"), ("sparseformer_nano", "sparse")])
def test_detectors(backbone, head):
    torch.manual_seed(0)
    model = lived_in(saccade.create_detector(backbone, head, num_classes=3, min_size=64, max_size=96)).double()
    copy = saccade.optimize(model, torch.float64)
    images = [torch.rand(3, 64, 80), torch.rand(3, 70, 64)]  # float32: cast at the door
    for found, expected in zip(copy(images), model([image.double() for image in images]), strict=True):
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found["boxes"], expected["boxes"], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-8, atol=1e-8)
        assert len(expected["boxes"]) > 0
