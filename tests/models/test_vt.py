"""VT-ResNets: backbone against timm's ResNet, tokens of the last stage, features, weights, options, training."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import DropPath
from torch import nn

import saccade
from saccade.models.vt import VT, insert
from saccade.tokens.visual_tokens import (
    TOKENIZERS,
    FilterTokenizer,
    KeepTokenizer,
    RecurrentTokenizer,
    RepeatedTokenizer,
)

ABLATIONS = [
    dict(tokenizer="clustering"),
    dict(tokenizer="pooling"),
    dict(recurrence="full"),
    dict(recurrence="none", depth=3),
    dict(relation="graph", recurrence="none", depth=3),
    dict(relation="none"),
    dict(relation="equations"),
    dict(relation=("transformer", "skip")),
    dict(projector=False),
    dict(value_projection=True, pool=True),
    dict(norm=False),
]


def images(batch=2, height=64, width=64, seed=0):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def create(name="vt_nano", **options):
    torch.manual_seed(0)
    return saccade.create_model(name, **({"num_classes": 5} | options)).eval()


def randomise_gains(model):
    """Randomise gains that start at zero, so that every branch has an effect."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.5, 1.0)
    return model


# Models of the paper


@pytest.mark.shows("VT-26", "VT-29", "VT-30", "VT-32", "VT-33", "VT-35", "VTR-08")
@pytest.mark.parametrize(
    ("name", "depths", "dims", "modules"),
    [  # Table 11
        ("vt_resnet18", (2, 2, 2), (256, 512), 2),
        ("vt_resnet34", (3, 4, 6), (256, 512), 3),
        ("vt_resnet50", (3, 4, 6), (1024, 1024), 3),
        ("vt_resnet101", (3, 4, 23), (1024, 1024), 3),
    ],
)
def test_stages_match_table_11(name, depths, dims, modules):
    with torch.device("meta"):
        model = saccade.create_model(name)
    assert tuple(len(stage) for stage in (model.layer1, model.layer2, model.layer3)) == depths
    blocks = model.layer4.blocks
    assert [type(block.tokenizer) for block in blocks] == [FilterTokenizer] + [RecurrentTokenizer] * (modules - 1)
    assert [block.projector is not None for block in blocks] == [True] * (modules - 1) + [False]
    assert (blocks[0].tokenizer.to_score.in_features, blocks[1].tokenizer.to_query.linear.out_features) == dims
    assert blocks[0].tokenizer.to_score.out_features == 16
    assert model.num_features == model.get_classifier().in_features == 1024


@pytest.mark.shows("VT-36")
def test_classifier_reads_the_mean_of_the_tokens():
    """`forward_features` returns the same tokens, one per row."""
    model = randomise_gains(create())
    with torch.no_grad():
        tokens = model.forward_tokens(images())
        torch.testing.assert_close(model(images()), model.head.fc(tokens.mean(1)))
        features = model.forward_features(images())
        assert torch.equal(features[..., 0].transpose(1, 2), tokens)
        bare = create(num_classes=0, global_pool="")
        randomise_gains(bare).load_state_dict(
            {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}
        )
        torch.testing.assert_close(bare(images()), features)


@pytest.mark.shows("VT-34", "VT-42", "VT-46", "VT-49")
@pytest.mark.parametrize("options", [dict(), *ABLATIONS], ids=str)
def test_ablations_train_at_any_size(options):
    model = randomise_gains(create(**options)).train()
    model(images(height=40, width=72)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    model.eval()
    with torch.no_grad():
        assert model(images(1, 32, 32)).isfinite().all()
        with saccade.record(model) as traces:
            model(images(1, 75, 51))
    for trace in traces:
        assert trace.maps().shape[2:] == ((5, 4) if options.get("pool") else (10, 7))
        torch.testing.assert_close(trace.maps().sum((2, 3)), torch.ones(trace.maps().shape[:2]))


@pytest.mark.parametrize(
    "options", [dict(), dict(value_projection=True, dim=256, project_last=True), dict(norm=False)], ids=str
)
def test_inference_equals_training_with_equal_statistics(options):
    """Inference folds norms into linear layers and into the attention; training does not."""
    model = randomise_gains(create(**options)).double().train()
    statistics = {}

    def keep(module, given):
        dims = [dim for dim in range(given[0].ndim) if dim != 1]
        statistics[module] = given[0].mean(dims), given[0].var(dims, unbiased=False)

    norms = [module for module in model.modules() if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))]
    hooks = [norm.register_forward_pre_hook(keep) for norm in norms]
    with torch.no_grad():
        expected, levels = model.forward_intermediates(images().double())
        for hook in hooks:
            hook.remove()
        for norm, (mean, variance) in statistics.items():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
        output, again = model.eval().forward_intermediates(images().double())
    assert len(statistics) == len(norms)
    for a, b in zip([output, *again], [expected, *levels], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_ablations_export_and_compile(options):
    model = randomise_gains(create(**options))
    with torch.no_grad():
        expected = model(images())
        for converted in (
            torch.export.export(model, (images(),)).module(),
            torch.compile(model, fullgraph=True, backend="aot_eager"),
        ):
            torch.testing.assert_close(converted(images()), expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_first_value_is_an_error_that_names_value_projection():
    with pytest.raises(TypeError, match="first_value is now value_projection"):
        saccade.create_model("vt_nano", first_value=True)


@pytest.mark.shows("VT-25")
def test_record_traces_the_new_tokens_of_every_module():
    """The first module makes all tokens, each later one replaces half; with their own names and tokens."""
    model = randomise_gains(create("vt_resnet18"))
    with torch.no_grad(), saccade.record(model) as traces:
        model(images(1))
    assert [trace.name for trace in traces] == ["layer4.blocks.0", "layer4.blocks.1"]
    assert [tuple(trace.maps().shape) for trace in traces] == [(1, 16, 4, 4), (1, 8, 4, 4)]
    assert [tuple(trace.tokens.shape) for trace in traces] == [(1, 16, 1024), (1, 8, 1024)]


@pytest.mark.shows("VT-25", "VTR-04")
def test_modules_replace_half_of_the_tokens():
    model = randomise_gains(create(depth=3))
    calls = {}
    for i, block in enumerate(model.layer4.blocks):
        block.tokenizer.register_forward_hook(
            lambda module, given, out, i=i: calls.update({i: (given[1] if i else None, out[0])})
        )
    with torch.no_grad():
        model(images())
    for i in (1, 2):
        before, after = calls[i]
        assert torch.equal(after[:, :4], before[:, 4:])  # the second half moves to the front, and is the next query
        assert not torch.equal(after[:, 4:], before[:, :4])


@pytest.mark.shows("VT-28", "VT-45")
def test_recurrence_and_projector_select_the_later_tokenizers():
    kinds = {
        "none": RepeatedTokenizer,
        "full": RecurrentTokenizer,
        "half": RecurrentTokenizer,
    }
    for recurrence, kind in kinds.items():
        assert isinstance(create(recurrence=recurrence).layer4.blocks[1].tokenizer, kind)
    assert isinstance(create(projector=False).layer4.blocks[1].tokenizer, KeepTokenizer)
    with torch.no_grad():  # 8 new tokens and half of the previous ones
        assert create(recurrence="none", depth=3).forward_tokens(images()).shape[1] == 8 + (8 + 4) // 2


@pytest.mark.shows("VTR-01", "VTR-02", "VTR-05")
def test_readings_of_the_vt_fpn_module_are_switches():
    """A norm on the scores of filters (2 M parameters), and no ReLU before the feed-forward matrix."""
    plain, normed = create(), create(score_norm=True)
    extra = normed.state_dict().keys() - plain.state_dict().keys()
    assert {key.rpartition(".")[0] for key in extra} == {"layer4.blocks.0.tokenizer.score_norm.bn"}
    added = sum(p.numel() for p in normed.parameters()) - sum(p.numel() for p in plain.parameters())
    assert added == 2 * 8
    plain, linear = (randomise_gains(create(relu=relu)) for relu in (True, False))
    linear.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert (plain(images()) - linear(images())).abs().max() > 1e-3


# Features


@pytest.mark.shows("VT-27", "VTR-08")
def test_features_only_equals_classifier_after_loading():
    """Only the extractor has a last projector, and it starts as the identity."""
    classifier = randomise_gains(create())
    extractor = create(features_only=True)
    report = saccade.load_checkpoint(extractor, classifier.state_dict())
    assert all(name.startswith("layer4.blocks.1.projector.") for name in report.new)
    assert "starts as the identity" in str(report)
    with torch.no_grad():
        for a, b in zip(extractor(images()), classifier.forward_intermediates(images())[1], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.shows("VT-27")
def test_last_features_depend_on_the_last_tokens():
    model = randomise_gains(create(features_only=True))
    levels = model(images())
    last = model.model.layer4.blocks[1]
    (gradient,) = torch.autograd.grad(levels[-1].square().sum(), last.relation.to_value.linear.weight)
    assert gradient.abs().max() > 0
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16]
    assert create("vt_resnet18", features_only=True).feature_info.reduction() == [4, 8, 16, 32]


def test_output_stride_16_is_the_map_before_pooling():
    model = create(features_only=True, output_stride=8).eval()
    assert model.feature_info.reduction() == [2, 4, 8, 8]
    default = create(features_only=True).eval()
    default.load_state_dict(model.state_dict())
    torch.testing.assert_close(default(images())[-1], F.avg_pool2d(model(images())[-1], 2))
    assert create(features_only=True, pool=True).feature_info.reduction() == [2, 4, 8, 16]
    with pytest.raises(ValueError, match="output_stride must be 16 or 32, got 8"):
        create("vt_resnet18", output_stride=8)


def test_classifier_ignores_a_last_projector():
    extractor = create(project_last=True)
    report = saccade.load_checkpoint(create(), extractor.state_dict())
    assert not report.new
    assert report.ignored
    assert all(name.startswith("layer4.blocks.1.projector.") for name in report.ignored)


def test_pruned_model_without_tokens_raises():
    model = create()
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert len(model.forward_intermediates(images(), indices=[0, 1], intermediates_only=True)) == 2
    with pytest.raises(RuntimeError, match="has no tokens"):
        model(images())


def test_pruned_model_with_gradient_checkpointing_has_the_same_features():
    model = create().train()
    model.prune_intermediate_layers([0, 1])
    plain = model.forward_intermediates(images(), intermediates_only=True, indices=[0, 1])
    model.set_grad_checkpointing()
    checkpointed = model.forward_intermediates(images(), intermediates_only=True, indices=[0, 1])
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="has no tokens"):
        model.forward_tokens(images())


# ResNet weights


@pytest.mark.shows("VT-30", "VT-43")
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_weights_initialise_the_backbone(name):
    """With them, the first three stages equal those of timm's ResNet."""
    torch.manual_seed(1)
    resnet = randomise_gains(timm.create_model(name).eval())
    model = create(f"vt_{name}")
    report = saccade.load_checkpoint(model, resnet.state_dict())
    backbone = [key for key in model.state_dict() if not key.startswith(("layer4.", "head."))]
    assert report.source == "resnet (official)"
    assert report.loaded == len(backbone)
    assert set(report.new) == set(model.state_dict()) - set(backbone)
    assert set(report.ignored) == {key for key in resnet.state_dict() if key.startswith(("layer4.", "fc."))}
    assert "a plain ResNet has no VT modules" in str(report)
    with torch.no_grad():
        ours = model.forward_intermediates(images(1), indices=[0, 1, 2], intermediates_only=True)
        theirs = resnet.forward_intermediates(images(1), indices=[1, 2, 3], intermediates_only=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.shows("VT-43")
def test_torchvision_resnet_initialises_features_only():
    resnet = torchvision.models.resnet18()
    extractor = create("vt_resnet18", features_only=True, out_indices=(0, 1, 2))
    assert not saccade.load_checkpoint(extractor, resnet.state_dict()).new
    assert torch.equal(extractor.model.layer3[1].conv2.weight, resnet.layer3[1].conv2.weight)
    converted = saccade.convert_official(resnet.state_dict(), "vt_resnet18")
    assert not any(key.startswith(("layer4.", "fc.")) for key in converted)


def test_other_resnet_is_rejected_and_model_unchanged():
    model = create("vt_resnet18")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"does not have layer1\.2"):
        saccade.load_checkpoint(model, timm.create_model("resnet34").state_dict())
    with pytest.raises(ValueError, match="Use the same size and options"):
        saccade.load_checkpoint(model, timm.create_model("resnet50").state_dict())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Options


@pytest.mark.shows("VT-54")
def test_drop_path_rises_through_resnet_and_vt_modules():
    """Survival probability 0.9: the rate rises linearly from 0 in the first block to 0.1 in the last module."""
    model = create("vt_resnet18", drop_path_rate=0.1, drop_rate=0.2)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert max(rates) == rates[-1] == pytest.approx(0.1)
    assert sorted(set(rates)) == pytest.approx([0.1 * i / 7 for i in range(1, 8)])  # 6 blocks and 2 modules
    assert model.head.drop.p == 0.2


@pytest.mark.shows("VT-80")
def test_registered_tokenizer_is_used():
    """A class in TOKENIZERS is selected by its name."""

    class FirstPixels(nn.Module):
        def __init__(self, pixel_dim, token_dim, num_tokens, norm=True):
            super().__init__()
            self.fc, self.num_tokens = nn.Linear(pixel_dim, token_dim), num_tokens

        def forward(self, features, tokens=None):
            return (self.fc(features.flatten(2).transpose(1, 2)[:, : self.num_tokens]),)

    TOKENIZERS["first"] = FirstPixels
    try:
        assert create(tokenizer="first")(images()).shape == (2, 5)
    finally:
        del TOKENIZERS["first"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(tokenizer="magic"), "tokenizer must be one of filter, clustering, pooling"),
        (dict(recurrence="third"), "recurrence must be one of half, full, none"),
        (dict(relation="love"), "relation must be one of transformer"),
        (dict(relation=("none", "none", "none")), "one for each of 2 modules"),
        (dict(num_tokens=1), "expected num_tokens >= 2"),
        (dict(tokenizer="pooling", num_tokens=7), "with factors, got 7"),
        (dict(dim=100), r"divisible by (2 \* )?num_heads \(8\)"),
    ],
)
def test_wrong_options_raise(options, words):
    with pytest.raises(ValueError, match=words):
        create(**options)


# Training


def stripes(count, seed):
    """Noisy images of stripes in two directions, the classes; colour and phase are random."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    phase = torch.rand(count, 1, 1, generator=generator) * 6.3
    along = torch.arange(32).float()[None, None] + phase
    wave = torch.sin(along * 1.2).expand(count, 32, 32)
    wave = torch.where(labels[:, None, None] == 1, wave, wave.transpose(1, 2))
    colour = torch.randn(count, 3, 1, 1, generator=generator)
    colour = colour / colour.norm(dim=1, keepdim=True)
    return 2 * colour * wave[:, None] + 0.5 * torch.randn(count, 3, 32, 32, generator=generator), labels


@pytest.mark.shows("VT-42")
def test_vt_nano_trains_to_classify_stripes():
    """SGD with momentum from random weights: the loss falls to a tenth, and new images are classified."""
    model = create(num_classes=2).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)
    losses = []
    for step in range(25):
        inputs, labels = stripes(24, step)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.1 * sum(losses[:5])
    gains = [
        module.weight for name, module in model.named_modules() if name.endswith(("relation.norm.bn", "mlp.fc.norm.bn"))
    ]
    assert all(gain.abs().max() > 0.001 for gain in gains)  # gains that started at zero are trained
    inputs, labels = stripes(64, 1000)
    with torch.no_grad():
        assert (model.eval()(inputs).argmax(1) == labels).float().mean() > 0.95


def test_models_are_instances_of_vt():
    assert all(isinstance(create(name), VT) for name in ("vt_nano", "vt_resnet18"))


@pytest.mark.shows("VT-31", "VT-34", "VT-78")
@pytest.mark.parametrize(
    ("name", "channels"), [("vt_resnet18", 256), ("vt_resnet34", 256), ("vt_resnet50", 1024), ("vt_resnet101", 1024)]
)
@pytest.mark.parametrize(("pool", "side"), [(False, 14), (True, 7)])
def test_16_tokens_are_grouped_from_14x14_pixels(name, channels, pool, side):
    """At 224 px; graph networks for images have 128 to 340 nodes. `pool` halves the side."""
    with torch.device("meta"):
        model = create(name, pool=pool)
        shapes = []
        model.layer4.blocks[0].tokenizer.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
        tokens = model.forward_tokens(torch.empty(1, 3, 224, 224))
    assert shapes == [(1, channels, side, side)]
    assert tokens.shape == (1, 16, 1024)


# VT modules in other backbones


@pytest.mark.shows("VT-82")
@pytest.mark.parametrize(
    ("name", "stage", "side"), [("resnet10t", None, 4), ("convnext_atto", None, 4), ("resnet10t", "layer3", 2)]
)
def test_vt_modules_replace_a_stage_of_any_backbone(name, stage, side):
    """The last stage keeps its resolution, as in VT-ResNets; others are pooled, so that later stages fit."""
    torch.manual_seed(0)
    backbone = timm.create_model(name, num_classes=3)
    original = sum(parameter.numel() for parameter in backbone.parameters())
    model = insert(backbone, stage, token_dim=32, num_tokens=4, num_heads=4)
    assert model is backbone
    assert sum(parameter.numel() for parameter in model.parameters()) != original
    features = model.eval().forward_features(torch.randn(2, 3, 64, 64))
    assert features.shape == (2, backbone.num_features, side, side)
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(2, 3, 64, 64))
    assert [trace.maps().shape[1] for trace in traces] == [4, 2]
    model.train()(torch.randn(2, 3, 64, 64)).sum().backward()
    name = stage or backbone.feature_info[-1]["module"]
    block = model.get_submodule(name).blocks[-1]
    assert block.projector.norm.bn.weight.grad.abs().sum() > 0


@pytest.mark.shows("VT-82")
def test_inserted_modules_are_those_of_a_vt_resnet():
    """ResNet-18 with VT modules, all projected, has the features of `vt_resnet18` with a last projector."""
    vt = saccade.create_model("vt_resnet18", project_last=True, key_groups=1, output_stride=16).eval()
    resnet = insert(timm.create_model("resnet18"), depth=2).eval()
    state_dict = {key: value for key, value in vt.state_dict().items() if not key.startswith("head.")}
    assert resnet.load_state_dict(state_dict, strict=False).missing_keys == ["fc.weight", "fc.bias"]
    randomise_gains(resnet)
    vt.load_state_dict(resnet.state_dict() | {k: v for k, v in vt.state_dict().items() if "head." in k}, strict=False)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = vt.forward_intermediates(pixels, intermediates_only=True)[-1]
        torch.testing.assert_close(resnet.forward_features(pixels), expected)


def test_insert_names_wrong_stages_and_options():
    with pytest.raises(ValueError, match=r"stage must be one of .*layer4; got 'layer5'"):
        insert(timm.create_model("resnet10t"), "layer5")
    with pytest.raises(TypeError, match="no option 'token'"):
        insert(timm.create_model("resnet10t"), token=3)
    with pytest.raises(ValueError, match=r"expected stage layers\.3 to map features"):
        insert(timm.create_model("swin_tiny_patch4_window7_224"))
