"""Observation of one forward pass, and the position of every family's maps in the image."""

import pytest
import torch
from torch import Tensor, nn

import saccade
from saccade.explanation.drawing.alignment import record_alignment
from saccade.explanation.hooks.record import record
from saccade.explanation.observe import eval_mode, observe, step_summary, step_title, super_token_maps
from saccade.tokens.super_tokens import SuperTokenizer
from saccade.tokens.trace import AssignmentTrace
from tests.explanation.planted import observation, quadrants, region_trace, step, view


def noise(size: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(seed))


def with_dot(size: tuple[int, int], y: int, x: int, seed: int = 0) -> Tensor:
    """Noise with a bright dot."""
    image = noise(size, seed)
    image[..., y - 2 : y + 3, x - 2 : x + 3] = 8
    return image


@pytest.mark.parametrize("size", [(16, 16), (13, 22)])
@pytest.mark.parametrize("dot", [(0, 0), (5, 6), (12, 15), (9, 3)])
def test_svit_map_of_the_dots_token_peaks_at_the_dot(size, dot):
    features = torch.zeros(1, 3, *size)
    features[:, 0] = 1
    features[:, :, dot[0], dot[1]] = torch.tensor([0.0, 20.0, 0.0])
    tokenizer = SuperTokenizer(4)
    trace = tokenizer.trace((features,), tokenizer(features))
    maps = trace.maps()[0]
    token = dot[0] // 4 * trace.grid[1] + dot[1] // 4
    assert divmod(int(maps[token].argmax()), size[1]) == dot
    assert int(maps[:, dot[0], dot[1]].argmax()) == token


def fit_dot_detector(model: nn.Module, module: nn.Module, weight: Tensor, size: tuple[int, int]) -> None:
    """Set one row of a scoring layer to separate dots from noise, by Fisher's discriminant on the module's input."""
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    rng = torch.Generator().manual_seed(5)
    dots = torch.stack([torch.randint(16, side - 16, (32,), generator=rng) for side in size], 1)
    images = [with_dot(size, int(y), int(x), seed) for seed, (y, x) in enumerate(dots)]
    plain = [noise(size, seed) for seed in range(32)]
    with torch.no_grad():
        model(torch.cat([*images, *plain]))
        handle.remove()
        features = (inputs[0] if inputs[0].ndim == 3 else inputs[0].flatten(2).mT).double()  # (64, N, C)
        change = (features[:32] - features[32:]).norm(dim=2)  # (32, N)
        positive = torch.stack([one[cells.argmax()] for one, cells in zip(features, change, strict=False)])
        background = features[32:].flatten(0, 1)
        covariance = background.T.cov() + 1e-3 * torch.eye(background.shape[1], dtype=torch.float64)
        direction = torch.linalg.solve(covariance, positive.mean(0) - background.mean(0))
        weight[0] = 30 * direction / direction.norm()


def peak_errors(model: nn.Module, index: int, size: tuple[int, int]) -> Tensor:
    """Distance in cells from each of eight dots to the maximum of map 0."""
    errors = []
    for y, x in [(24, 40), (50, 31), (77, 60), (33, 79), (90, 22), (61, 48), (45, 66), (70, 35)]:
        with torch.no_grad(), record(model) as traces, record_alignment(model, size) as alignments:
            model(with_dot(size, y, x, y))
        trace, alignment = traces[index], alignments[traces[index].size]
        cell = torch.tensor(divmod(int(trace.maps()[0, 0].argmax()), trace.size[1]))
        stride = torch.tensor(alignment.stride)
        errors.append((torch.tensor(alignment.offset) + stride * cell - torch.tensor([y, x])) / stride)
    return torch.stack(errors)


def assert_aligned(errors: Tensor) -> None:
    """Most dots are at their own cell (the features are random), and the cells are not shifted."""
    assert (errors.abs().amax(1) < 1).sum() > len(errors) / 2, errors
    assert errors.median(0).values.abs().max() < 0.35, errors


@pytest.mark.parametrize("size", [(128, 128), (117, 99)])
def test_paca_map_of_a_dot_detector_peaks_at_the_dot(size):
    torch.manual_seed(0)
    model = saccade.create_model("paca_nano", clustering="linear").eval()
    tokenizer = model.stages[1].blocks[0].tokenizer  # stride 8
    fit_dot_detector(model, tokenizer, tokenizer.clustering.to_score.weight.data, size)
    assert_aligned(peak_errors(model, 1, size))


@pytest.mark.parametrize("size", [(128, 128), (117, 99)])
def test_vt_map_of_a_dot_detector_peaks_at_the_dot(size):
    torch.manual_seed(0)
    model = saccade.create_model("vt_nano").eval()
    tokenizer = model.layer4.blocks[0].tokenizer
    fit_dot_detector(model, tokenizer, tokenizer.to_score.weight.data, size)
    assert_aligned(peak_errors(model, 0, size))


@pytest.mark.parametrize("size", [(128, 128), (96, 133)])
def test_sparseformer_map_of_the_most_changed_token_is_at_the_dot(size):
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", region_init="cell").eval()
    side = round(len(model.regions) ** 0.5)
    rng = torch.Generator().manual_seed(3)
    dots = torch.stack([torch.randint(8, length - 8, (32,), generator=rng) for length in size], 1)
    with torch.no_grad(), record(model) as traces:
        model(torch.cat([noise(size), *(with_dot(size, int(y), int(x)) for y, x in dots)]))
    changes = (traces[0].tokens[1:] - traces[0].tokens[:1]).norm(dim=2)
    errors = []
    for (y, x), token, maps in zip(dots, changes.argmax(1), traces[0].maps(bandwidth=0.1)[1:], strict=True):
        mass = maps[token] / maps[token].sum()
        rows, columns = (torch.arange(n) + 0.5 for n in mass.shape)
        centre = torch.stack([(mass.sum(1) * rows).sum() / len(rows), (mass.sum(0) * columns).sum() / len(columns)])
        errors.append((centre - torch.tensor([(y + 0.5) / size[0], (x + 0.5) / size[1]])) * side)
    error = torch.stack(errors)
    assert error.abs().max() < 0.75  # in cells of the token grid: the nearest token is within half a cell
    assert error.mean(0).abs().max() < 0.3


def test_observe_restores_the_model():
    model = saccade.create_model("svit_nano").train()
    model.stages[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()]
    observe(model, view(64, 64), (0.5,) * 3, (0.5,) * 3)
    assert model.training
    assert not model.stages[0].training
    assert [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()] == hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_observe_records_steps_in_order():
    observed = observe(saccade.create_model("svit_nano"), view(64, 64), (0.5,) * 3, (0.5,) * 3)
    assert [one.index for one in observed.steps] == [0, 1, 2]
    assert [one.title for one in observed.steps] == ["stage 1, block 1", "stage 2, block 1", "stage 2, block 2"]
    assert {one.alignment.stride for one in observed.steps} == {(4.0, 4.0), (8.0, 8.0)}
    assert [one.array_key for one in observed.steps] == [one.trace.name for one in observed.steps]
    assert observed.main == observed.steps


def test_observe_refuses_a_video_model():
    model = saccade.create_model("video_sparseformer_nano").eval()
    clip = view(64, 64)._replace(image=torch.rand(3, 8, 64, 64))
    with pytest.raises(TypeError, match="expected an image model, got a video model"):
        observe(model, clip, (0.5,) * 3, (0.5,) * 3)


def test_eval_mode_restores_each_modules_mode():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [True, False]


def test_main_steps_are_the_last_of_each_stage():
    names = [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(3)]
    steps = [step(quadrants()._replace(name=name), (8, 8)) for name in names]
    assert [one.trace.name for one in observation(view(8, 8), *steps).main] == [names[2], names[5]]
    regions = [step(region_trace([(0.5, 0.5)]), (8, 8))] * 6
    assert len(observation(view(8, 8), *regions).main) == 6


@pytest.mark.parametrize(
    ("name", "call", "title"),
    [
        ("stages.1.blocks.4", 0, "stage 2, block 5"),
        ("backbone.stages.0.blocks.0", 0, "stage 1, block 1"),
        ("layer4.blocks.0", 0, "block 1"),
        ("layer4.blocks.0", 2, "block 1, step 3"),
        ("tokenizer", 0, "tokenizer"),
        ("", 0, "tokens"),
    ],
)
def test_step_title_is_readable(name, call, title):
    trace = AssignmentTrace(torch.ones(1, 2, 4), (2, 2), name=name, step=call)
    assert step_title(trace, [trace]) == title


def test_step_summary_describes_a_trace():
    trace = quadrants(4)
    assert step_summary(trace, "block 1") == {
        "name": "blocks.0",
        "step": 0,
        "title": "block 1",
        "tokens": 4,
        "grid": [4, 4],
    }


@pytest.mark.parametrize("size", [(64, 64), (50, 75)])
def test_maps_of_chosen_super_tokens_match_the_trace(size):
    model = saccade.create_model("svit_nano").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, *size))
    for trace in traces:
        maps = trace.maps()[0]
        some = torch.tensor([0, len(maps) - 1, 5, 2])
        assert torch.equal(super_token_maps(trace, some), maps[some])
        assert torch.equal(super_token_maps(trace, torch.arange(len(maps))), maps)


def test_map_chunks_cover_all_tokens_in_order():
    one = step(AssignmentTrace(torch.rand(1, 150, 36), (6, 6)), (6, 6))
    chunks = list(one.map_chunks((6, 6)))
    assert [(tokens.start, tokens.stop) for tokens, _ in chunks] == [(0, 64), (64, 128), (128, 150)]
    torch.testing.assert_close(torch.cat([maps for _, maps in chunks]), one.maps((6, 6)))
