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

DOTS = [(24, 40), (50, 31), (77, 60), (33, 79), (90, 22), (61, 48), (45, 66), (70, 35)]


def dot_image(size: tuple[int, int], y: int, x: int) -> Tensor:
    """Black, with a bright dot of 5 x 5 pixels."""
    image = torch.zeros(1, 3, *size)
    image[..., y - 2 : y + 3, x - 2 : x + 3] = 1
    return image


@torch.no_grad()
def plant_brightness(conv: nn.Conv2d) -> None:
    """Make channel 0 the brightness around a pixel (a binomial filter of the input's channel 0), channel 1 constant.

    A LayerNorm after the convolution is then monotonic in the brightness.
    """
    line = torch.tensor([1.0])
    for _ in range(conv.kernel_size[0] - 1):
        line = torch.nn.functional.conv1d(line.view(1, 1, -1), torch.ones(1, 1, 2), padding=1).flatten()
    conv.weight.zero_()
    conv.weight[0, 0] = line[:, None] * line / line.sum() ** 2
    if conv.bias is not None:
        conv.bias.zero_()
        conv.bias[1] = 1


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


def peak_errors(model: nn.Module, index: int, size: tuple[int, int]) -> Tensor:
    """Distance in cells from each of eight dots to the maximum of map 0."""
    errors = []
    for y, x in DOTS:
        with torch.no_grad(), record(model) as traces, record_alignment(model, size) as alignments:
            model(dot_image(size, y, x))
        trace, alignment = traces[index], alignments[traces[index].size]
        cell = torch.tensor(divmod(int(trace.maps()[0, 0].argmax()), trace.size[1]))
        stride = torch.tensor(alignment.stride)
        errors.append((torch.tensor(alignment.offset) + stride * cell - torch.tensor([y, x])) / stride)
    return torch.stack(errors)


@pytest.mark.parametrize("size", [(128, 128), (117, 99)])
def test_paca_map_of_a_brightness_cluster_peaks_at_the_dot(size):
    """Planted weights: convolutions measure brightness, blocks change nothing, cluster 0 scores brightness."""
    model = saccade.create_model("paca_nano", clustering="linear").eval()
    with torch.no_grad():
        for conv in (model.stem.conv1, model.stem.conv2, model.stages[1].merge.conv):
            plant_brightness(conv)
        for block in [*model.stages[0].blocks, *model.stages[1].blocks]:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()
        weight = model.stages[1].blocks[0].tokenizer.clustering.to_score.weight  # stride 8
        weight.zero_()
        weight[0, 0] = 10
    assert peak_errors(model, 1, size).abs().max() <= 0.5  # cells: the cell nearest to each dot


@pytest.mark.parametrize("size", [(128, 128), (117, 99)])
def test_vt_map_of_a_brightness_filter_peaks_at_the_dot(size):
    """Planted weights: convolutions measure brightness, filter 0 of the first tokenizer scores brightness."""
    model = saccade.create_model("vt_nano").eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                plant_brightness(module)
        for stage in (model.layer1, model.layer2, model.layer3):
            for block in stage:
                block.bn2.weight.fill_(block.downsample is not None)
                if block.downsample is not None:  # the convolutions alone, else the shortcut alone
                    block.downsample[1].weight.zero_()
        weight = model.layer4.blocks[0].tokenizer.to_score.weight
        weight.zero_()
        weight[0, 0] = 100
    assert peak_errors(model, 0, size).abs().max() <= 0.5


@pytest.mark.parametrize("size", [(128, 128), (96, 133)])
def test_sparseformer_map_of_the_brightest_token_is_at_the_dot(size):
    """Planted weights: the features are the image, every token adds the sum of its samples to its first channel."""
    model = saccade.create_model(
        "sparseformer_nano", region_init="cell", image_features="rgb", decoding="linear", repeats=1
    ).eval()
    tokenizer = model.focus.blocks[0].tokenizer
    side = round(len(model.regions) ** 0.5)
    with torch.no_grad():
        tokenizer.decoder.proj.weight.zero_()
        tokenizer.decoder.proj.weight[0] = 1
        images = torch.cat([dot_image(size, y, x) for y, x in DOTS])
        with record(model) as traces:
            model(torch.cat([torch.zeros_like(images[:1]), images]))
    changes = (traces[0].tokens[1:] - traces[0].tokens[:1])[..., 0]
    errors = []
    for (y, x), token, maps in zip(DOTS, changes.argmax(1), traces[0].maps(bandwidth=0.1)[1:], strict=True):
        mass = maps[token] / maps[token].sum()
        rows, columns = (torch.arange(n) + 0.5 for n in mass.shape)
        centre = torch.stack([(mass.sum(1) * rows).sum() / len(rows), (mass.sum(0) * columns).sum() / len(columns)])
        errors.append((centre - torch.tensor([(y + 0.5) / size[0], (x + 0.5) / size[1]])) * side)
    error = torch.stack(errors)
    assert error.abs().max() < 0.6, error  # in cells of the token grid: the nearest token is within half a cell
    assert error.mean(0).abs().max() < 0.2


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
