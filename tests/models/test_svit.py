"""SViT against the authors' implementation in float64 (parity kit stvit_small), and its options."""

import pytest
import torch

import saccade
from tests.parity import kit

VARIANT = "stvit_small"


@pytest.fixture(scope="module")
def model():
    model = saccade.create_model("svit_small")
    saccade.load_checkpoint(model, kit.weights(VARIANT))
    return model.double().eval()


def test_kit_weights_have_the_expected_sums():
    sums = torch.stack([value.double().sum() for value in kit.weights(VARIANT).values()])
    torch.testing.assert_close(sums, kit.golden(VARIANT)["weights/sum"], rtol=1e-9, atol=1e-9)


@pytest.mark.shows("SVIT-10", "SVIT-25", "SVIT-32")
@pytest.mark.parametrize("size", kit.INPUTS)
def test_logits_match_the_authors_code(model, size):
    with torch.no_grad():
        assert kit.error(model(kit.images(size)), kit.golden(VARIANT)[f"logits/{size}"]) <= kit.FLOAT64


def test_logits_in_float32_are_within_float32_rounding(model):
    with torch.no_grad():
        logits = model.float()(kit.images("160x256").float())
    model.double()
    assert kit.error(logits, kit.golden(VARIANT)["logits/160x256"]) <= 1e-5


@pytest.mark.shows("SVIT-13", "SVIT-19", "SVIT-20", "SVIT-21", "SVIT-22", "SVIT-23", "SVIT-24")
def test_stages_and_first_blocks_match_the_authors_code(model):
    outputs = {}

    def save(name):
        return lambda module, inputs, output: outputs.__setitem__(name, output)

    hooks = [model.stem.register_forward_hook(save("stem"))]
    for i, stage in enumerate(model.stages, start=1):
        hooks.append(stage.register_forward_hook(save(f"stage{i}")))
        hooks.append(stage.blocks[0].register_forward_hook(save(f"block/stage{i}.0")))
        hooks.append(stage.blocks[0].attn.register_forward_hook(save(f"attn/stage{i}.0")))
    with torch.no_grad():
        model(kit.images("224"))
    for hook in hooks:
        hook.remove()
    assert len(outputs) == 13
    for name, value in outputs.items():
        kit.check_summary(VARIANT, name, value)


@pytest.mark.shows("SVIT-01", "SVIT-05")
@pytest.mark.parametrize("size", kit.INPUTS)
def test_trace_association_matches_the_authors_code(model, size):
    with torch.no_grad(), saccade.record(model) as traces:
        model(kit.images(size))
    trace, golden = traces[0], kit.golden(VARIANT)[f"association/{size}"]
    assert (trace.name, trace.cell) == ("stages.0.blocks.0", 8)
    (height, width), (rows, columns) = trace.size, trace.grid
    grid = trace.association[0].unflatten(0, (height, width))  # (H, W, 9)
    cells = (0, 1, 8, 24) if size == "224" else (0, rows * columns - 1)
    for cell, official in zip(cells, golden, strict=True):
        top, left = cell // columns * 8, cell % columns * 8
        result = grid[top : top + 8, left : left + 8]
        expected = official.unflatten(0, (8, 8))[: result.shape[0], : result.shape[1]]  # a trace has no padding
        assert kit.error(result, expected) <= kit.FLOAT64


@pytest.mark.parametrize(
    ("entry", "options"),
    [("logits_n_iter_2", {"iterations": 2}), ("logits_stoken_16_8_2_1", {"super_token": (16, 8, 2, 1)})],
)
@pytest.mark.parametrize("size", ["224", "250x190"])
@pytest.mark.shows("SVIT-12", "SVIT-26")
def test_other_grids_and_iterations_match_the_authors_code(entry, options, size):
    model = saccade.create_model("svit_small", **options)
    saccade.load_checkpoint(model, kit.weights(VARIANT))
    with torch.no_grad():
        logits = model.double().eval()(kit.images(size))
    assert kit.error(logits, kit.golden(VARIANT)[f"{entry}/{size}"]) <= kit.FLOAT64


@pytest.mark.shows("SVIT-11")
def test_gradients_match_the_authors_code(model):
    images = kit.images("224").requires_grad_()
    golden = kit.golden(VARIANT)
    loss = kit.loss(model(images))  # eval mode: BatchNorm in eval, drop rates 0
    loss.backward()
    assert kit.error(loss.detach(), golden["grad/loss"]) <= kit.FLOAT64
    assert kit.error(images.grad.norm(), golden["grad/input/norm"]) <= kit.FLOAT64
    assert kit.error(images.grad[0, :, 100:116, 100:116], golden["grad/input/slice"]) <= kit.FLOAT64
    names = kit.official_names(VARIANT, lambda official: saccade.convert_official(official, "svit_small"))
    norms, checked = kit.gradient_norms(VARIANT), 0
    for name, parameter in model.named_parameters():
        if names[name] in norms:
            assert abs(parameter.grad.norm().item() / norms[names[name]] - 1) <= 1e-8, name
            checked += 1
    assert checked == len(norms) == 354
    model.zero_grad(set_to_none=True)


def test_training_statistics_match_the_authors_code():
    model = saccade.create_model("svit_small")
    saccade.load_checkpoint(model, kit.weights(VARIANT))
    with torch.no_grad():
        logits = model.double().train()(kit.images("224"))
    assert kit.error(logits, kit.golden(VARIANT)["train_bn/logits"]) <= kit.FLOAT64
    names = kit.official_names(VARIANT, lambda official: saccade.convert_official(official, "svit_small"))
    official = [name for name, _, _, kind in kit.keys(VARIANT) if kind == "buffer"]
    sums = {names[name]: buffer.double().sum() for name, buffer in model.named_buffers()}
    result = torch.stack([sums[name] for name in official])
    assert kit.error(result, kit.golden(VARIANT)["train_bn/buffers"]) <= kit.FLOAT64


@pytest.mark.shows("SVIT-11")
def test_association_is_a_constant_in_backward_unless_detach_is_false():
    torch.manual_seed(0)
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    gradients = []
    for detach in (True, False):
        torch.manual_seed(1)
        model = saccade.create_model("svit_nano", num_classes=3, detach=detach).double().eval()
        (gradient,) = torch.autograd.grad(model(images).square().sum(), images)
        gradients.append(gradient)
    assert (gradients[0] - gradients[1]).norm() > 1e-4 * gradients[0].norm()


def test_unknown_option_value_raises_with_the_choices():
    with pytest.raises(ValueError, match=r"position must be one of cpe, ape, rpe, none; got 'sine'"):
        saccade.create_model("svit_nano", position="sine")


@pytest.mark.shows("SVIT-36")
@pytest.mark.parametrize("position", ["ape", "rpe"])
def test_position_tables_are_interpolated_and_trained(position):
    model = saccade.create_model("svit_nano", position=position, img_size=64).eval()
    tables = [name for name, _ in model.named_parameters() if name.endswith(".table")]
    assert set(tables) == model.no_weight_decay() != set()
    model(torch.randn(1, 3, 50, 70)).sum().backward()
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in tables)


@pytest.mark.parametrize(
    "options",
    [dict(super_token=(8, 4)), dict(depths=3), dict(heads=(1, 2, 5)), dict(iterations=(1, 1)), dict(layer_scale=0.1)],
)
def test_an_option_without_a_number_per_stage_raises(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be 4 numbers, one per stage; got"):
        saccade.create_model("svit_nano", **options)


@pytest.mark.shows("SVIT-30")
@pytest.mark.parametrize(
    ("name", "values"),
    [("svit_small", [0, 0, 0, 0]), ("svit_base", [0, 0, 1e-6, 1e-6]), ("svit_large", [0, 0, 1e-6, 1e-6])],
)
def test_layer_scale_is_in_the_last_two_stages_of_base_and_large(name, values):
    """0: a block without layer scale."""
    model = saccade.create_model(name, depths=(1, 1, 1, 1))
    for stage, value in zip(model.stages, values, strict=True):
        for scale in (stage.blocks[0].scale1, stage.blocks[0].scale2):
            assert (scale.gamma == value).all() if value else isinstance(scale, torch.nn.Identity)
    other = saccade.create_model("svit_nano", layer_scale=(0.1, None, None, None))
    assert (other.stages[0].blocks[0].scale1.gamma == 0.1).all()


@pytest.mark.shows("SVIT-31")
def test_initial_weights_are_those_of_the_authors_code():
    """Linear layers: truncated normal of 0.02, zero bias. Norms: 1 and 0. Convolutions: PyTorch's uniform default."""
    torch.manual_seed(0)
    model = saccade.create_model("svit_small")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert module.weight.mean().abs() < 0.001
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, torch.nn.LayerNorm | torch.nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        elif isinstance(module, torch.nn.Conv2d) and module.weight.numel() > 10_000:
            bound = (module.in_channels // module.groups * module.kernel_size[0] ** 2) ** -0.5
            assert 0.99 * bound < module.weight.abs().max() <= bound


@pytest.mark.shows("SVIT-31")
def test_drop_path_rises_linearly_over_all_blocks():
    with torch.device("meta"):
        model = saccade.create_model("svit_small", drop_path_rate=0.1)
    rates = [getattr(block.drop_path2, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.1 * i / 19 for i in range(20)])


@pytest.mark.shows("SVIT-54")
@pytest.mark.parametrize("super_token", [None, (16, 8, 2, 1)])
def test_dense_backbones_have_the_grid_of_classification_unless_given(super_token):
    options = {} if super_token is None else {"super_token": super_token}
    expected = list(super_token or (8, 4, 1, 1))
    with torch.device("meta"):
        backbones = [
            saccade.create_segmenter("svit_small", "upernet", 5, backbone_kwargs=options).backbone,
            saccade.create_detector("svit_small", "mask_rcnn", 5, backbone_kwargs=options).backbone,
        ]
    for backbone in backbones:
        blocks = [module for module in backbone.modules() if type(module).__name__ == "SViTStage"]
        tokenizers = [getattr(stage.blocks[0].attn, "tokenizer", None) for stage in blocks]
        assert [1 if tokenizer is None else tokenizer.cell for tokenizer in tokenizers] == expected
