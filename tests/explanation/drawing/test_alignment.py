"""Alignment of feature maps with the image, to the pixel."""

import pytest
import torch
from torch import nn

import saccade
from saccade.explanation.drawing.alignment import Alignment, axis_weights, record_alignment, resample_maps
from saccade.explanation.hooks.record import grouping_modules


def measured_centre(layers: nn.Module, size: tuple[int, int], cell: tuple[int, int]) -> tuple[float, float]:
    """Centre of the receptive field of one output pixel, by gradient, for layers whose weights are all ones."""
    image = torch.zeros(1, 1, *size, requires_grad=True)
    layers(image)[0, 0][cell].backward()
    rows, columns = torch.where(image.grad[0, 0] != 0)
    return (rows.min() + rows.max()).item() / 2, (columns.min() + columns.max()).item() / 2


@pytest.mark.parametrize("size", [(64, 64), (63, 50), (41, 65)])
@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(nn.Conv2d(1, 1, 3, 2, 1), nn.Conv2d(1, 1, 3, 1, 1), nn.Conv2d(1, 1, 3, 2, 1)),
        nn.Sequential(nn.Conv2d(1, 1, 7, 2, 3), nn.AvgPool2d(3, 2, 1)),
        nn.Sequential(nn.Conv2d(1, 1, 4, 4)),
        nn.Sequential(nn.Conv2d(1, 1, (3, 5), (1, 2), (0, 2))),
    ],
)
def test_alignment_matches_receptive_field_centres(layers, size):
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.ones_(layer.weight)
    with torch.no_grad(), record_alignment(layers, size) as alignments:
        output = layers(torch.zeros(1, 1, *size))
    alignment = alignments[tuple(output.shape[2:])]
    for cell in [(3, 4), (5, 3)]:
        row, column = measured_centre(layers, size, cell)
        assert alignment.offset[0] + alignment.stride[0] * cell[0] == row
        assert alignment.offset[1] + alignment.stride[1] * cell[1] == column


def test_record_alignment_removes_its_hooks():
    layers = nn.Sequential(nn.Conv2d(1, 1, 3, 2, 1))
    with record_alignment(layers, (8, 8)):
        assert len(layers[0]._forward_hooks) == 1
    assert not layers[0]._forward_hooks


def test_resampled_cell_is_centred_on_its_pixel():
    maps = torch.zeros(1, 4, 4)
    maps[0, 1, 2] = 1
    drawn = resample_maps(maps, Alignment((4, 4), (0, 0)), (16, 16), (16, 16))[0]
    assert divmod(int(drawn.argmax()), 16) == (4, 8)
    assert drawn[4, 8] == 1
    assert drawn[2, 8] == 0.5
    assert drawn[4, 11] == 0.25


def test_stretched_alignment_matches_interpolate():
    maps = torch.rand(3, 5, 7)
    drawn = resample_maps(maps, Alignment.stretched((5, 7), (40, 70)), (40, 70), (23, 31))
    expected = torch.nn.functional.interpolate(maps[None], (23, 31), mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(drawn, expected)


def test_nearest_weights_select_the_nearest_centre():
    weights = axis_weights(4, stride=4, offset=0, image_size=16, size=16, nearest=True)
    assert weights.argmax(1).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert weights.sum(1).tolist() == [1] * 16


@pytest.mark.parametrize("size", [(128, 160), (125, 99)])
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano"])
def test_alignment_of_every_family_matches_the_image(name, size):
    """A bright dot changes the features most at the aligned cell, without a shift of half a cell."""
    torch.manual_seed(0)
    model = saccade.create_model(name).eval()
    rng = torch.Generator().manual_seed(1)
    background = torch.rand(1, 3, *size, generator=rng)
    dots = torch.stack([torch.randint(20, side - 20, (24,), generator=rng) for side in size], 1)
    images = background.repeat(len(dots), 1, 1, 1)
    for image, (y, x) in zip(images, dots, strict=True):
        image[:, y - 1 : y + 2, x - 1 : x + 2] = 8
    inputs = []
    for _, module in grouping_modules(model):
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad(), record_alignment(model, size) as alignments, saccade.record(model) as traces:
        model(torch.cat([background, images]))
    for features, trace in zip(inputs, traces, strict=True):
        width = trace.size[1]
        change = (features[1:] - features[:1]).flatten(2) if features.ndim == 4 else (features[1:] - features[:1]).mT
        cell = change.norm(dim=1).argmax(1)
        alignment = alignments[trace.size]
        stride, offset = torch.tensor(alignment.stride), torch.tensor(alignment.offset)
        error = (torch.stack([cell // width, cell % width], 1) * stride + offset - dots) / stride
        assert error.abs().max() < 1.3, f"{trace.name}: a dot is {error.abs().max():.2f} cells away"
        if alignment.stride[0] >= 8:
            assert error.mean(0).abs().max() < 0.25, f"{trace.name}: all dots are shifted by {error.mean(0)} cells"
