"""The bright dot of the issue: the responsible map of every family has its maximum where the dot is."""

import pytest
import torch
from torch import Tensor, nn

import saccade
from saccade.explain.drawing.alignment import places
from saccade.explain.hooks.record import record
from saccade.explain.observe import observe
from saccade.tokens.super_tokens import SuperTokenizer


def dotted(size: tuple[int, int], y: int, x: int, seed: int = 0) -> Tensor:
    image = noise(size, seed)
    image[..., y - 2 : y + 3, x - 2 : x + 3] = 8
    return image


def noise(size: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(16, 16), (13, 22)])
@pytest.mark.parametrize("at", [(0, 0), (5, 6), (12, 15), (9, 3)])
def test_svit_the_dots_own_token_has_its_maximum_there(size, at):
    features = torch.zeros(1, 3, *size)
    features[:, 0] = 1
    features[:, :, at[0], at[1]] = torch.tensor([0.0, 20.0, 0.0])
    tokenizer = SuperTokenizer(4)
    trace = tokenizer.trace((features,), tokenizer(features))
    maps = trace.maps()[0]
    token = at[0] // 4 * trace.grid[1] + at[1] // 4
    assert divmod(int(maps[token].argmax()), size[1]) == at
    assert int(maps[:, at[0], at[1]].argmax()) == token


def look_for_dots(model: nn.Module, module: nn.Module, weight: Tensor, size: tuple[int, int]) -> None:
    """Set one row of a scoring layer to tell a dot from the ground, by Fisher's discriminant on the module's input."""
    heard: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    random = torch.Generator().manual_seed(5)
    places_of_dots = torch.stack([torch.randint(16, side - 16, (32,), generator=random) for side in size], 1)
    images = [dotted(size, int(y), int(x), seed) for seed, (y, x) in enumerate(places_of_dots)]
    plain = [noise(size, seed) for seed in range(32)]
    with torch.no_grad():
        model(torch.cat([*images, *plain]))
        handle.remove()
        features = heard[0] if heard[0].ndim == 3 else heard[0].flatten(2).mT  # (96, N, C)
        features = features.double()
        change = (features[:32] - features[32:]).norm(dim=2)  # (32, N)
        dots = torch.stack([one[cells.argmax()] for one, cells in zip(features, change, strict=False)])
        ground = features[32:].flatten(0, 1)
        spread = ground.T.cov() + 1e-3 * torch.eye(ground.shape[1], dtype=torch.float64)
        direction = torch.linalg.solve(spread, dots.mean(0) - ground.mean(0))
        weight[0] = 30 * direction / direction.norm()


def offsets(model: nn.Module, step: int, size: tuple[int, int]) -> Tensor:
    """For several dots, how many cells the maximum of map 0 is away."""
    found = []
    for y, x in [(24, 40), (50, 31), (77, 60), (33, 79), (90, 22), (61, 48), (45, 66), (70, 35)]:
        with torch.no_grad(), record(model) as traces, places(model, size) as known:
            model(dotted(size, y, x, y))
        trace, place = traces[step], known[traces[step].size]
        row, column = divmod(int(trace.maps()[0, 0].argmax()), trace.size[1])
        at = torch.tensor([place.offset[0] + place.stride[0] * row, place.offset[1] + place.stride[1] * column])
        found.append((at - torch.tensor([y, x])) / torch.tensor(place.stride))
    return torch.stack(found)


def check(off: Tensor) -> None:
    """Nearly every dot is found at its own cell, and the cells are not shifted."""
    assert (off.abs().amax(1) < 1).sum() >= len(off) - 1, off
    assert off.median(0).values.abs().max() < 0.35, off


@pytest.mark.parametrize("size", [(128, 128), (117, 99)])
def test_paca_a_cluster_that_looks_for_dots_finds_them(size):
    torch.manual_seed(0)
    model = saccade.create_model("paca_nano", clustering="linear").eval()
    tokenizer = model.stages[1].blocks[0].tokenizer  # stride 8
    look_for_dots(model, tokenizer, tokenizer.clustering.to_score.weight.data, size)
    check(offsets(model, 1, size))


@pytest.mark.parametrize("size", [(128, 128), (117, 99)])
def test_vt_a_filter_that_looks_for_dots_finds_them(size):
    torch.manual_seed(0)
    model = saccade.create_model("vt_nano").eval()
    tokenizer = model.layer4.blocks[0].tokenizer
    look_for_dots(model, tokenizer, tokenizer.to_score.weight.data, size)
    check(offsets(model, 0, size))


@pytest.mark.parametrize("size", [(128, 128), (96, 133)])
def test_sparseformer_the_token_that_sees_the_dot_has_its_map_there(size):
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", region_init="cell").eval()
    side = round(len(model.regions) ** 0.5)
    random = torch.Generator().manual_seed(3)
    dots = torch.stack([torch.randint(8, length - 8, (32,), generator=random) for length in size], 1)
    with torch.no_grad(), record(model) as traces:
        model(torch.cat([noise(size), *(dotted(size, int(y), int(x)) for y, x in dots)]))
    changes = (traces[0].tokens[1:] - traces[0].tokens[:1]).norm(dim=2)
    off = []
    for (y, x), token, one in zip(dots, changes.argmax(1), traces[0].maps(bandwidth=0.1)[1:], strict=True):
        maps = one[token]
        rows, columns = (torch.arange(n) + 0.5 for n in maps.shape)
        mass = maps / maps.sum()
        centre = torch.stack([(mass.sum(1) * rows).sum() / len(rows), (mass.sum(0) * columns).sum() / len(columns)])
        off.append((centre - torch.tensor([(y + 0.5) / size[0], (x + 0.5) / size[1]])) * side)
    off = torch.stack(off)
    assert off.abs().max() < 0.75  # of a cell of the tokens' grid: half is the nearest token
    assert off.mean(0).abs().max() < 0.25


def test_what_the_model_sees_is_what_is_drawn():
    """The same frame: a dot of the picture lies at the same share of the drawn one."""
    from PIL import Image

    from saccade.explain.images import load_view

    for width, height in [(200, 100), (97, 131), (64, 64), (31, 300)]:
        picture = Image.new("RGB", (width, height))
        picture.putpixel((width * 3 // 10, height * 6 // 10), (255, 255, 255))
        view = load_view(picture, 64)
        seen, drawn = view.image.sum(0), torch.from_numpy(view.picture.astype("float32")).sum(2)
        at = [divmod(int(values.argmax()), values.shape[1]) for values in (seen, drawn)]
        for axis in (0, 1):
            shares = [(place[axis] + 0.5) / values.shape[axis] for place, values in zip(at, (seen, drawn), strict=True)]
            assert abs(shares[0] - shares[1]) <= 0.75 / seen.shape[axis]


def test_observing_leaves_the_model_as_it_was():
    from tests.explain.planted import view

    model = saccade.create_model("svit_nano").train()
    model.stages[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    observe(model, view(64, 64), (0.5,) * 3, (0.5,) * 3)
    assert model.training
    assert not model.stages[0].training
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
