"""PaCa-ViT against the authors' implementation in float64 (three parity kits), and its options."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import saccade
from saccade import ops
from saccade.models.checkpoint import identify
from saccade.ops._launch import record_specializations
from saccade.weights.read import CheckpointError
from tests.models import slow_paca
from tests.ops.compare import DEVICE, kernels_allowed, needs_triton, randn
from tests.parity import kit
from tests.parity.fill import fill

KITS = {
    "pacavit_tiny_p2cconv_100_0": "paca_tiny",
    "pacavit_small_p2cmlp_100_0": "paca_mlp_small",
    "pacavit_convmixer_small_100": "paca_ec_small",
}
TEACHER = "pacavit_convmixer_small_100"
NORMS = {"pacavit_tiny_p2cconv_100_0": 229, "pacavit_small_p2cmlp_100_0": 392, TEACHER: 447}  # gradients in the kits


def official(variant: str) -> dict[str, torch.Tensor]:
    """The authors' tensors in float64; parameters require a gradient."""
    kinds = {name: kind for name, _, _, kind in kit.keys(variant)}
    tensors = {}
    for name, value in kit.weights(variant).items():
        value = value.double() if value.is_floating_point() else value
        tensors[name] = value.requires_grad_() if kinds[name] == "param" else value
    return tensors


def build(variant: str) -> torch.nn.Module:
    return saccade.create_model(KITS[variant]).double().eval()


@pytest.fixture(scope="module", params=KITS)
def run(request):
    """Forward and backward of the kit's batch, with gradients of the authors' own tensors."""
    variant, outputs = request.param, {}
    model, tensors = build(variant), official(variant)
    converted = saccade.convert_official(tensors, KITS[variant])

    def save(name, choose=lambda output: output):
        return lambda module, inputs, output: outputs.__setitem__(name, choose(output).detach())

    model.stem.register_forward_hook(save("stem"))
    for i, stage in enumerate(model.stages, start=1):
        first = stage.blocks[0]
        stage.register_forward_hook(save(f"stage{i}"))
        first.register_forward_hook(save(f"block/stage{i}.0", lambda output: output[0].flatten(2).transpose(1, 2)))
        first.attn.register_forward_hook(save(f"attn/stage{i}.0"))
        first.attn.register_forward_hook(
            lambda module, inputs, output, i=i: outputs.__setitem__(f"inputs{i}", (module, inputs))
        )
    if model.teacher is not None:
        for i, stage in enumerate(model.teacher.stages, start=1):
            stage.register_forward_hook(save(f"teacher/stage{i}", lambda output: output.flatten(2).transpose(1, 2)))
        for i, down in enumerate(model.teacher.pyramid):
            down.register_forward_hook(save(f"teacher/fpn{3 - i}"))
    images = kit.images("224").requires_grad_()
    with saccade.record(model) as traces:
        logits = functional_call(model, converted, (images,))
        outputs["maps"] = {i: attention_map(converted, i, *outputs.pop(f"inputs{i}")) for i in (1, 2, 3, 4)}
    loss = kit.loss(logits)
    loss.backward()
    return variant, tensors, images, logits.detach(), loss.detach(), outputs, traces


def attention_map(converted, stage, attention, inputs):
    """The attention of a first block (B, heads, N, M), which the fused kernel does not return."""
    tensors = {
        name: converted[f"stages.{stage - 1}.blocks.0.attn.{name}"].detach() for name, _ in attention.named_parameters()
    }
    pixels, source = inputs[0].detach(), inputs[-1].detach()
    if "qkv.weight" in tensors:
        (query, key, _), (query_bias, key_bias, _) = tensors["qkv.weight"].chunk(3), tensors["qkv.bias"].chunk(3)
    else:
        query, query_bias = tensors["to_query.weight"], tensors["to_query.bias"]
        (key, _), (key_bias, _) = tensors["to_key_value.weight"].chunk(2), tensors["to_key_value.bias"].chunk(2)
    query = F.linear(pixels, query, query_bias).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
    key = F.linear(source, key, key_bias).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
    return (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(-1)


@pytest.mark.shows("PACA-09", "PACA-26", "PACA-32")
def test_logits_at_224(run):
    variant, _, _, logits, *_ = run
    assert kit.error(logits, kit.golden(variant)["logits/224"]) <= kit.FLOAT64


@pytest.mark.shows(
    "PACA-18",
    "PACA-19",
    "PACA-20",
    "PACA-21",
    "PACA-22",
    "PACA-24",
    "PACA-27",
    "PACA-28",
    "PACA-29",
    "PACA-30",
    "PACA-31",
)
def test_stages_blocks_and_teacher_match_the_authors_code(run):
    variant, _, _, _, _, outputs, _ = run
    summaries = {name: value for name, value in outputs.items() if name != "maps"}
    assert len(summaries) == (20 if variant == TEACHER else 13)
    for name, value in summaries.items():
        kit.check_summary(variant, name, value)


@pytest.mark.shows("PACA-05", "PACA-13", "PACA-23")
def test_trace_assignments_match_the_authors_code(run):
    variant, *_, traces = run
    golden = kit.golden(variant)
    expected = [name for name in golden if name.startswith("clusters/") and name.endswith("/slice")]
    assert [f"clusters/stage{int(trace.name[7]) + 1}.{trace.name[-1]}/slice" for trace in traces] == sorted(expected)
    for trace, name in zip(traces, sorted(expected), strict=True):
        assert kit.error(trace.maps()[0, :8, :8, :8], golden[name]) <= kit.FLOAT64
        assignment = trace.assignment[0]
        entropy = -(assignment * assignment.log()).sum(-1)
        assert kit.error(entropy, golden[name.replace("slice", "entropy")]) <= kit.FLOAT64
        assert torch.equal(trace.scores.softmax(-1), trace.assignment)


@pytest.mark.shows("PACA-12")
def test_attention_maps(run):
    variant, _, _, _, _, outputs, _ = run
    for stage, attention in outputs["maps"].items():
        assert kit.error(attention[0, :2, :8, :16], kit.golden(variant)[f"map/stage{stage}.0"]) <= kit.FLOAT64


def test_gradients(run):
    """The gradient of every official parameter, taken through the converter."""
    variant, tensors, images, _, loss, _, _ = run
    golden = kit.golden(variant)
    assert kit.error(loss, golden["grad/loss"]) <= kit.FLOAT64
    assert kit.error(images.grad.norm(), golden["grad/input/norm"]) <= kit.FLOAT64
    assert kit.error(images.grad[0, :, 100:116, 100:116], golden["grad/input/slice"]) <= kit.FLOAT64
    norms = kit.gradient_norms(variant)
    for name, norm in norms.items():
        assert abs(tensors[name].grad.norm().item() / norm - 1) <= kit.FLOAT64, name
    unchecked = {name for name, value in tensors.items() if value.requires_grad} - set(norms)
    assert all(name.endswith(".bias") for name in unchecked)  # a softmax is invariant to them
    assert len(norms) == NORMS[variant]


@pytest.mark.shows("PACA-08", "PACA-26")
@pytest.mark.parametrize("variant", KITS)
@pytest.mark.parametrize("size", ["160x256", "250x190"])
def test_logits_at_other_sizes(variant, size):
    model = build(variant)
    report = saccade.load_checkpoint(model, kit.weights(variant))
    assert (report.source, report.new, report.ignored) == ("paca (official)", {}, ())
    with torch.no_grad():
        assert kit.error(model(kit.images(size)), kit.golden(variant)[f"logits/{size}"]) <= kit.FLOAT64


def test_logits_in_float32_are_within_float32_rounding():
    model, variant = saccade.create_model("paca_ec_small").eval(), TEACHER
    saccade.load_checkpoint(model, kit.weights(variant))
    with torch.no_grad():
        logits = model(kit.images("160x256").float())
    assert kit.error(logits, kit.golden(variant)["logits/160x256"]) <= 1e-5


def test_training_statistics_of_the_teacher():
    model, tensors = build(TEACHER).train(), official(TEACHER)
    with torch.no_grad():  # BatchNorm writes into the authors' own buffers, which the converter passes on
        logits = functional_call(model, saccade.convert_official(tensors, "paca_ec_small"), (kit.images("224"),))
    assert kit.error(logits, kit.golden(TEACHER)["train_bn/logits"]) <= kit.FLOAT64
    buffers = [name for name, _, _, kind in kit.keys(TEACHER) if kind == "buffer"]
    sums = torch.stack([tensors[name].double().sum() for name in buffers])
    assert kit.error(sums, kit.golden(TEACHER)["train_bn/buffers"]) <= kit.FLOAT64


@pytest.mark.parametrize("variant", KITS)
def test_reference_matches_the_kits(variant):
    """The tests below rely on the reference for variants without a kit."""
    size = slow_paca.VARIANTS[variant]
    assert slow_paca.official_keys(**size) == kit.keys(variant)
    with torch.no_grad():
        tensors = {name: value.double() for name, value in kit.weights(variant).items()}
        logits = slow_paca.forward(tensors, kit.images("160x256"), **size)
    assert kit.error(logits, kit.golden(variant)["logits/160x256"]) <= kit.FLOAT64


BASE = dict(dims=(96, 192, 384, 512), depths=(3, 3, 18, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
SMALL = slow_paca.TINY | dict(depths=(3, 3, 10, 3))
WITHOUT_KIT = [  # our name, its options, the same for the reference
    ("paca_small", {}, SMALL),
    pytest.param("paca_base", {}, BASE, marks=pytest.mark.slow),
    ("paca_ec_tiny", {}, slow_paca.TINY | dict(depths=(2, 2, 2, 2), clusters=(100,) * 4, teacher=(2, 2, 2, 2))),
    pytest.param(
        "paca_ec_base",
        {},
        BASE | dict(depths=(3, 3, 16, 3), clusters=(100,) * 4, teacher=(2, 2, 4, 2)),
        marks=pytest.mark.slow,
    ),
    ("paca_small", dict(clustering_scope="block", clusters=(100,) * 4), SMALL | dict(every=1, clusters=(100,) * 4)),
    ("paca_mlp_small", dict(clustering_scope=2), SMALL | dict(every=2, clustering="mlp")),
    ("paca_small", dict(clusters=(49, 64, 81, 100)), SMALL | dict(clusters=(49, 64, 81, 100))),
    ("paca_tiny", dict(clusters=(0, 0, 0, 0)), slow_paca.TINY | dict(clusters=(0, 0, 0, 0))),
    ("paca_tiny", dict(clusters=(1, 0, 2, 0), num_classes=3), slow_paca.TINY | dict(clusters=(1, 0, 2, 0), classes=3)),
]


@pytest.mark.shows("PACA-09", "PACA-11", "PACA-38")
@pytest.mark.parametrize(
    ("name", "switches", "size"), WITHOUT_KIT, ids=lambda value: value if type(value) is str else ""
)
def test_variants_without_a_kit_match_the_reference(name, switches, size):
    tensors = fill(slow_paca.official_keys(**size))
    model = saccade.create_model(name, **switches)
    report = saccade.load_checkpoint(model, {"state_dict": {f"module.{key}": tensors[key] for key in tensors}})
    assert report.loaded == len(model.state_dict())
    images = torch.randn(2, 3, 72, 56, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = slow_paca.forward({key: value.double() for key, value in tensors.items()}, images, **size)
        assert kit.error(model.double().eval()(images), expected) <= kit.FLOAT64


@pytest.mark.parametrize("variant", KITS)
def test_a_detector_checkpoint_loads_into_features_only(variant):
    """mmdetection's layout: keys with the prefix `backbone.`, no classifier, other modules."""
    weights = {f"backbone.{key}": value for key, value in kit.weights(variant).items() if not key.startswith("head.")}
    model = saccade.create_model(KITS[variant], features_only=True).eval()
    report = saccade.load_checkpoint(model, {"state_dict": weights | {"neck.conv.weight": torch.ones(1)}})
    assert (report.new, report.ignored) == ({}, ())
    classifier = saccade.create_model(KITS[variant]).eval()
    saccade.load_checkpoint(classifier, kit.weights(variant))
    images = kit.images("160x256").float()[:, :, :96, :64]
    with torch.no_grad():
        _, expected = classifier.forward_intermediates(images)
        for level, reference in zip(model(images), expected, strict=True):
            assert torch.equal(level, reference)


@pytest.mark.parametrize(
    "variant", [TEACHER, *(pytest.param(name, marks=pytest.mark.slow) for name in KITS if name != TEACHER)]
)
def test_identify_names_the_model_of_a_checkpoint(variant):
    assert identify(kit.weights(variant)) == (KITS[variant], 1000)


@pytest.mark.shows("PACA-39")
def test_another_number_of_clusters_reinitialises_only_their_scores():
    """PaCa Sec. 3.2.4: from 100 to 200 for ADE20k."""
    weights = kit.weights("pacavit_tiny_p2cconv_100_0")
    model = saccade.create_model("paca_tiny", clusters=(200, 100, 200, 0))
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    report = saccade.load_checkpoint(model, weights)
    scores = {f"stages.{i}.blocks.0.tokenizer.clustering.to_score.weight" for i in (0, 2)}
    assert set(report.new) == scores
    assert set(report.new.values()) == {"200 clusters here, 100 in the checkpoint"}
    converted = saccade.convert_official(weights, "paca_tiny")
    for name, value in model.state_dict().items():
        assert torch.equal(value, initial[name] if name in scores else converted[name]), name
    assert model.eval()(torch.randn(1, 3, 64, 64)).isfinite().all()


def test_another_number_of_clusters_with_a_teacher_or_features_only():
    model = saccade.create_model("paca_ec_small", clusters=(100, 100, 200, 200), features_only=True)
    report = saccade.load_checkpoint(model, kit.weights(TEACHER))
    assert set(report.new) == {f"teacher.to_score.{i}.{kind}" for i in (2, 3) for kind in ("weight", "bias")}
    assert report.ignored == ("head.fc.weight", "head.fc.bias")
    own = saccade.create_model("paca_nano", num_classes=3, clusters=(8, 8, 8, 0), clustering="mlp")
    other = saccade.create_model("paca_nano", num_classes=3, clusters=(8, 4, 8, 0), clustering="mlp")
    report = saccade.load_checkpoint(other, own.state_dict())
    assert set(report.new) == {f"stages.1.blocks.0.tokenizer.clustering.to_score.{kind}" for kind in ("weight", "bias")}


def test_a_checkpoint_of_other_options_raises():
    model = saccade.create_model("paca_nano", clusters=(8, 8, 8, 0))
    with pytest.raises(CheckpointError, match="paca_nano"):
        saccade.load_checkpoint(model, saccade.create_model("paca_nano", clusters=(8, 8, 8, 8)).state_dict())


def test_logits_are_invariant_to_the_order_of_clusters():
    torch.manual_seed(0)
    model, images = saccade.create_model("paca_nano", num_classes=9).double().eval(), torch.randn(2, 3, 64, 48).double()
    with torch.no_grad():
        expected = model(images)
        for stage in model.stages[:3]:
            weight = stage.blocks[0].tokenizer.clustering.to_score.weight
            weight.copy_(weight[torch.randperm(len(weight))])
        torch.testing.assert_close(model(images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clustering", ["conv", "mlp", "linear"])
def test_one_cluster_gives_every_pixel_the_same_update(clustering):
    torch.manual_seed(0)
    model = saccade.create_model("paca_nano", clusters=(1, 1, 1, 1), clustering=clustering).double().eval()
    updates = []
    for stage in model.stages:
        stage.blocks[-1].attn.register_forward_hook(lambda module, inputs, output: updates.append(output))
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 48).double())
    assert len(updates) == 4
    for pixels in updates:
        torch.testing.assert_close(pixels, pixels[:, :1].expand_as(pixels), rtol=1e-12, atol=1e-12)
        assert pixels.shape[1] == 1 or (pixels[0] - pixels[1]).abs().max() > 1e-6  # but not every image


@pytest.mark.parametrize("keyword", ["clustering_scope", "where"])
@pytest.mark.parametrize(("scope", "blocks"), [("stage", [0]), ("block", [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
@pytest.mark.shows("PACA-10", "PACA-11", "PACA-13")
def test_clustering_scope_decides_which_blocks_compute_and_report(scope, blocks, keyword):
    model = saccade.create_model("paca_nano", clusters=(0, 0, 6, 0), **{keyword: scope}).eval()
    with saccade.record(model) as traces:
        logits = model(torch.randn(1, 3, 64, 96))
    assert [trace.name for trace in traces] == [f"stages.2.blocks.{block}" for block in blocks]
    for trace in traces:
        assert trace.maps().shape == (1, 6, 4, 6)
        assert trace.tokens.shape == (1, 6, 128)
        (gradient,) = torch.autograd.grad(logits[0, 0], trace.scores, retain_graph=True)
        assert gradient.abs().max() > 0


@pytest.mark.shows("PACA-25")
def test_the_teacher_can_be_another_network():

    class Rows(torch.nn.Module):
        """Two clusters, the upper and the lower half of every stage; no features to add."""

        def forward(self, features):
            scores = []
            for stage in range(4):
                height, width = (-(-side // 2**stage) for side in features.shape[2:])
                upper = (torch.arange(height) < height // 2).repeat_interleave(width)
                scores.append(torch.stack([upper, ~upper]).to(features) * 100)
            return [score.expand(len(features), -1, -1) for score in scores], [None] * 4

    model = saccade.create_model("paca_nano", clusters=(2, 2, 2, 2), teacher=Rows(), num_classes=4).eval()
    with saccade.record(model) as traces, torch.no_grad():
        assert model(torch.randn(2, 3, 64, 64)).isfinite().all()
    assert [trace.name for trace in traces] == [f"stages.{i}.blocks.0" for i in range(4)]
    upper, lower = traces[1].maps()[0]
    assert upper[:4].sum() > 0.999
    assert lower[4:].sum() > 0.999


@pytest.mark.parametrize(
    "switches",
    [dict(norm="post"), dict(norm="sub"), dict(layer_scale=0.1), dict(position="ape", img_size=32)],
    ids=lambda switches: next(iter(switches)) + "_" + str(next(iter(switches.values()))),
)
def test_optional_parts_are_added_and_trained(switches):
    torch.manual_seed(0)
    plain = saccade.create_model("paca_nano", num_classes=3)
    model = saccade.create_model("paca_nano", num_classes=3, **switches)
    added = set(dict(model.named_parameters())) - set(dict(plain.named_parameters()))
    assert any(word in name for name in added for word in ("post_norm", "attn.norm", "mlp.norm", "scale", "table"))
    model(torch.randn(2, 3, 64, 48)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in added)


def test_layer_scale_of_one_is_the_identity_and_of_nearly_zero_removes_the_blocks():
    images, logits = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)), {}
    for value in (None, 1.0, 1e-12):
        torch.manual_seed(0)
        model = saccade.create_model("paca_nano", num_classes=3, layer_scale=value).eval()
        with torch.no_grad():
            logits[value] = model(images)
    torch.testing.assert_close(logits[None], logits[1.0])
    model.stages[0].blocks = torch.nn.ModuleList()
    model.stages[2].blocks = torch.nn.ModuleList()
    with torch.no_grad():
        torch.testing.assert_close(model(images), logits[1e-12])


def test_post_norm_bounds_the_update_of_a_branch():
    """After a LayerNorm of scale 1, what a branch adds has mean square 1 at every pixel, however large its output."""
    model = saccade.create_model("paca_nano", norm="post").eval()
    updates = []
    for stage in model.stages:
        for block in stage.blocks:
            torch.nn.init.normal_(block.attn.proj.weight, std=30)
            block.post_norm1.register_forward_hook(lambda module, inputs, output: updates.append(output))
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    assert len(updates) == 10
    for update in updates:
        torch.testing.assert_close(update.square().mean(1), torch.ones_like(update[:, 0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (dict(clusters=(100, 100, 100)), "clusters must be 4 numbers"),
        (dict(clusters=(1, 1, 1, -1)), "clusters must be 4 numbers"),
        (dict(clusters=100), "clusters must be 4 numbers"),
        (dict(depths=(1, 1)), "depths must be 4 numbers, one per stage"),
        (dict(heads=2), "heads must be 4 numbers, one per stage; got 2"),
        (dict(clustering="kmeans"), "clustering must be one of conv, mlp, linear, stride, pool; got 'kmeans'"),
        (dict(clustering_scope="layer"), "clustering_scope must be 'stage', 'block' or a number"),
        (dict(where=0), "clustering_scope must be 'stage', 'block' or a number"),
        (dict(where="block", clustering_scope="block"), "Pass clustering_scope alone"),
        (dict(norm="both"), "norm must be one of pre, post, sub"),
        (dict(position="rope"), "position must be one of none, ape"),
        (dict(teacher=(1, 1, 1, 1), where="block"), "Leave clustering_scope at 'stage'"),
        (dict(heads=(3, 2, 4, 6)), r"dim \(32\) must be divisible by num_heads \(3\)"),
    ],
)
def test_a_wrong_option_raises_an_error_that_names_it(switches, message):
    with pytest.raises(ValueError, match=message):
        saccade.create_model("paca_nano", **switches)


@pytest.mark.shows("PACA-33")
def test_initial_weights_have_the_standard_deviations_of_the_authors_code():
    """1x1 convolutions of the authors are initialised as convolutions, though they are linear layers here."""
    torch.manual_seed(0)
    model = saccade.create_model("paca_ec_tiny")
    onsite = saccade.create_model("paca_tiny").stages[2].blocks[0].tokenizer.clustering
    mlp = saccade.create_model("paca_mlp_small").stages[2].blocks[0].tokenizer.clustering
    block = model.stages[2].blocks[0]
    for weight, std in [
        (block.attn.to_query.weight, 0.02),
        (block.mlp.fc1.weight, 0.02),
        (mlp.to_score.weight, 0.02),
        (block.mlp.conv.weight, (2 / 9) ** 0.5),
        (model.stages[2].merge.conv.weight, (2 / (9 * 320)) ** 0.5),
        (onsite.conv.weight, (2 / 49) ** 0.5),
        (onsite.mix.weight, (2 / 320) ** 0.5),
        (onsite.to_score.weight, (2 / 100) ** 0.5),
        (model.teacher.to_score[1].weight, (2 / 100) ** 0.5),
        (model.teacher.pyramid[0].lateral.weight, (2 / 320) ** 0.5),
    ]:
        assert abs(weight.std().item() / std - 1) < 0.05
    assert all(layer.bias.abs().max() == 0 for layer in (block.mlp.conv, block.mlp.fc1, onsite.mix))


@pytest.mark.shows("PACA-12", "PACA-29")
@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"norm": "sub", "layer_scale": 0.5}, {"clustering": "mlp"}])
def test_blocks_are_the_residual_sums_written_out(options):
    torch.manual_seed(0)
    model = saccade.create_model("paca_nano", num_classes=5, **options).double()
    features = model.forward_stem(torch.randn(2, 3, 64, 64, dtype=torch.float64))
    for stage in model.stages:
        merged = expected = stage.merge(features)
        link = None
        for block in stage.blocks:
            normed = block.norm1(expected)
            inputs = (normed.flatten(2).transpose(1, 2),)
            if block.tokenizer is not None:
                tokens, link, *_ = block.tokenizer(normed, link)
                inputs += (tokens,)
            update = block.attn(*inputs).transpose(1, 2).unflatten(2, normed.shape[2:])
            expected = expected + block.scale1(block.post_norm1(update))
            expected = expected + block.scale2(block.post_norm2(block.mlp(block.norm2(expected))))
        for added in (None, torch.randn_like(merged)):
            torch.testing.assert_close(
                stage(features, None, added), stage.norm(expected if added is None else expected + added)
            )
        features = stage(features)


@needs_triton
def test_inference_with_kernels_gives_the_same_logits():
    torch.manual_seed(0)
    model = saccade.create_model("paca_nano", num_classes=5, depths=(1, 1, 2, 1)).to(DEVICE).eval()
    images = randn(1, 3, 64, 64)
    with torch.no_grad():
        with ops.enabled(False):
            expected = model(images)
        with kernels_allowed(), record_specializations() as compiled:
            torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    norms = [dict(variant.constants)["ADD"] for variant in compiled if variant.kernel == "_norm_kernel"]
    assert set(norms) == {False, True}  # alone, and with the sum before it
