"""Where a cell of a map lies in the image, to the pixel."""

import pytest
import torch
from torch import nn

import saccade
from saccade.explain.drawing.alignment import Place, axis, draw_maps, places
from saccade.explain.hooks.record import reporters


def measured_centre(layers: nn.Module, size: tuple[int, int], cell: tuple[int, int]) -> tuple[float, float]:
    """Centre of what one output pixel depends on, by gradient, for layers whose weights are all ones."""
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
def test_places_are_the_centres_of_receptive_fields(layers, size):
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.ones_(layer.weight)
    with torch.no_grad(), places(layers, size) as found:
        output = layers(torch.zeros(1, 1, *size))
    place = found[tuple(output.shape[2:])]
    for cell in [(3, 4), (5, 3)]:
        row, column = measured_centre(layers, size, cell)
        assert place.offset[0] + place.stride[0] * cell[0] == row
        assert place.offset[1] + place.stride[1] * cell[1] == column


def test_a_cell_is_drawn_around_its_centre():
    maps = torch.zeros(1, 4, 4)
    maps[0, 1, 2] = 1
    drawn = draw_maps(maps, Place((4, 4), (0, 0)), (16, 16), (16, 16))[0]
    assert divmod(int(drawn.argmax()), 16) == (4, 8)
    assert drawn[4, 8] == 1
    assert drawn[2, 8] == 0.5
    assert drawn[4, 11] == 0.25


def test_stretching_agrees_with_interpolate():
    maps = torch.rand(3, 5, 7)
    drawn = draw_maps(maps, Place.stretched((5, 7), (40, 70)), (40, 70), (23, 31))
    expected = torch.nn.functional.interpolate(maps[None], (23, 31), mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(drawn, expected)


def test_nearest_takes_the_nearest_centre():
    weights = axis(4, stride=4, offset=0, image=16, size=16, nearest=True)
    assert weights.argmax(1).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("size", [(64, 64), (50, 75)])
def test_maps_of_some_super_tokens_are_those_of_the_trace(size):
    from saccade.explain.observe import super_token_maps

    model = saccade.create_model("svit_nano").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, *size))
    for trace in traces:
        maps = trace.maps()[0]
        some = torch.tensor([0, len(maps) - 1, 5, 2])
        assert torch.equal(super_token_maps(trace, some), maps[some])
        assert torch.equal(super_token_maps(trace, torch.arange(len(maps))), maps)


@pytest.mark.parametrize("size", [(128, 160), (125, 99)])
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano"])
def test_the_map_of_every_family_lies_where_the_image_does(name, size):
    """A bright dot moves the features most at the cell whose place is nearest, without a shift of half a cell."""
    torch.manual_seed(0)
    model = saccade.create_model(name).eval()
    random = torch.Generator().manual_seed(1)
    ground = torch.rand(1, 3, *size, generator=random)
    dots = torch.stack([torch.randint(20, side - 20, (24,), generator=random) for side in size], 1)
    images = ground.repeat(len(dots), 1, 1, 1)
    for image, (y, x) in zip(images, dots, strict=True):
        image[:, y - 1 : y + 2, x - 1 : x + 2] = 8
    heard = []
    for _, module in reporters(model):
        module.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    with torch.no_grad(), places(model, size) as found, saccade.record(model) as traces:
        model(torch.cat([ground, images]))
    for features, trace in zip(heard, traces, strict=True):
        width = trace.size[1]
        change = (features[1:] - features[:1]).flatten(2) if features.ndim == 4 else (features[1:] - features[:1]).mT
        cell = change.norm(dim=1).argmax(1)
        place = found[trace.size]
        at = torch.stack([cell // width, cell % width], 1) * torch.tensor(place.stride) + torch.tensor(place.offset)
        off = (at - dots) / torch.tensor(place.stride)
        assert off.abs().max() < 1.3, f"{trace.name}: a dot is {off.abs().max():.2f} cells away"
        if place.stride[0] >= 8:
            assert off.mean(0).abs().max() < 0.25, f"{trace.name}: all dots are shifted by {off.mean(0)} cells"
