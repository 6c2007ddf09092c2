"""SparseFormer v2 against the authors' implementation, in float64 (kits sparseformer_btsp_*), and bootstrapping."""

import logging
from functools import cache

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn

import saccade
from saccade.models.checkpoint import identify, match_checkpoint
from saccade.models.sparseformer_v2 import SparseFormerV2, bootstrap
from saccade.ops.roi_sampling import sample
from saccade.tokens.regions import RegionPosition, clamp_to_border, padded_region_grid
from saccade.tokens.trace import RegionTrace
from saccade.weights.read import CheckpointError
from tests.parity import kit

AUGREG, CLIP = "sparseformer_btsp_augreg_base", "sparseformer_btsp_clip_base"
KITS = {AUGREG: "sparseformer_btsp_augreg_base", CLIP: "sparseformer_btsp_openai_clip_base"}
# Parity in float32, of the fact sheet that comes with the kits: the highest frequency of the position encoding
# multiplies a rounding error of a region by 400.
FLOAT32 = {"logits": 2e-4, "forward": 2e-3, "moved": 5e-3}


@cache
def filled(name: str) -> dict[str, Tensor]:
    return kit.weights(KITS[name])


def weights(name: str = AUGREG) -> dict[str, Tensor]:
    """The kit's weights under the authors' names, a new dict each time."""
    return dict(filled(name))


def official(name: str, moved: bool = False, **options) -> nn.Module:
    """The kit's model; `moved` regions travel far and leave the image."""
    model = saccade.create_model(name, **options)
    theirs = weights(name)
    if moved:
        theirs["layers.0.roi_adjust_module.3.weight"] = 8 * theirs["layers.0.roi_adjust_module.3.weight"]
    saccade.load_checkpoint(model, theirs)
    return model.double().eval()


@pytest.fixture(scope="module", params=KITS)
def named(request) -> tuple[str, nn.Module]:
    return request.param, official(request.param)


def small(**options) -> SparseFormerV2:
    """A small model with all zero-initialised layers randomised."""
    torch.manual_seed(0)
    sizes = dict(num_classes=5, num_tokens=11, focus_dim=64, cortex_dim=128, repeats=3, depth=4, points=9, channels=16)
    model = SparseFormerV2(**(sizes | options)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("to_delta.weight", "to_offset.weight")):
            nn.init.normal_(parameter, std=0.3)
        elif name.endswith("to_weights.weight"):
            nn.init.normal_(parameter, std=0.02)
    return model


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The authors' numbers


@pytest.mark.parametrize("name", KITS)
def test_kit_fills_its_weights(name):
    values, golden = [value.double() for value in weights(name).values()], kit.golden(KITS[name])
    sums = torch.stack([value.sum() for value in values])
    torch.testing.assert_close(sums, golden["weights/sum"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.stack([value.abs().sum() for value in values]), golden["weights/abs"])
    for size in kit.INPUTS:
        assert kit.error(kit.images(size).flatten()[:64], golden[f"input/{size}"]) <= kit.FLOAT64


@pytest.mark.parametrize("size", kit.INPUTS)
def test_logits_match_the_official_ones(named, size):
    name, model = named
    with torch.no_grad():
        assert kit.error(model(kit.images(size)), kit.golden(KITS[name])[f"logits/{size}"]) <= kit.FLOAT64


def test_float32_is_within_its_rounding(named):
    name, model = named
    golden = kit.golden(KITS[name])
    with torch.no_grad(), saccade.record(model.float()) as traces:
        logits = model(kit.images("224").float())
    model.double()
    assert kit.error(logits, golden["logits/224"]) <= FLOAT32["logits"]
    for i, trace in enumerate(traces[1:]):
        assert kit.error(trace.regions, golden[f"roi/{i}"]) <= FLOAT32["forward"]


def test_every_step_matches_the_official_one(named):
    """Features, regions, points, samples, mixing, positions and tokens of every pass, bridge and final token."""
    name, model = named
    variant = KITS[name]
    golden, inputs = kit.golden(variant), kit.images("224")
    calls: dict[str, list[Tensor]] = {"mixing": [], "position": [], "bridge": [], "regions": []}
    block = model.focus.blocks[0]

    def position(module: RegionPosition, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        calls["position"].append(module.encode(inputs[1]))

    hooks = [model.bridge.register_forward_hook(lambda *call: calls["bridge"].append(call[-1]))]
    hooks.append(block.adjuster.register_forward_hook(lambda *call: calls["regions"].append(call[-1])))
    for unit in (block.sampling, model.resample):
        hooks.append(unit.tokenizer.decoder.register_forward_hook(lambda *call: calls["mixing"].append(call[-1])))
        hooks.append(unit.position.register_forward_hook(position))
    with torch.no_grad(), saccade.record(model) as traces:
        tokens, passes = model.forward_intermediates(inputs, output_fmt="NLC")
        features, final = model.stem(inputs), model.forward_head(tokens, pre_logits=True)
    for hook in hooks:
        hook.remove()
    assert {kind: len(values) for kind, values in calls.items()} == dict(mixing=5, position=5, bridge=1, regions=4)
    assert (len(traces), len(passes)) == (5, 13)
    assert [(trace.name, trace.step) for trace in traces] == [
        *(("focus.blocks.0", step) for step in range(4)),
        ("resample.tokenizer", 0),
    ]
    kit.check_summary(variant, "stem", features)
    kit.check_summary(variant, "bridge", calls["bridge"][0])
    assert kit.error(final, golden["final"]) <= kit.FLOAT64
    for i, trace in enumerate(traces):
        assert isinstance(trace, RegionTrace)
        points = golden[f"points/{i}"]
        assert kit.error(trace.points[0, : len(points)], points) <= kit.FLOAT64
        kit.check_summary(variant, f"mixing/{i}", calls["mixing"][i])
        if i in (0, 4):
            assert kit.error(calls["position"][i][0, :2], golden[f"position/{i}"]) <= kit.FLOAT64
        else:
            kit.check_summary(variant, f"position/{i}", calls["position"][i])
        if i:
            assert kit.error(trace.regions, golden[f"roi/{i - 1}"]) <= kit.FLOAT64
    for i, regions in enumerate(calls["regions"]):
        assert kit.error(regions, golden[f"roi/{i}"]) <= kit.FLOAT64
    sampled = sample(features, clamp_to_border(traces[0].points, features))[0, :4, :, :8]
    assert kit.error(sampled, golden["sampled/0"]) <= kit.FLOAT64
    for i, after in enumerate(passes):
        kit.check_summary(variant, f"tokens/{i}", after)


@pytest.mark.parametrize("name", KITS)
def test_regions_that_leave_the_image_match_the_official_ones(name):
    model, golden, inputs = official(name, moved=True), kit.golden(KITS[name]), kit.images("224").requires_grad_()
    with saccade.record(model) as traces:
        logits = model.train()(inputs)
    assert kit.error(logits, golden["logits_moved/224"]) <= kit.FLOAT64
    for i, trace in enumerate(traces[1:]):
        assert kit.error(trace.regions, golden[f"roi_moved/{i}"]) <= kit.FLOAT64
    points = traces[-1].points
    assert ((points < 0) | (points > 1)).float().mean() > 0.05
    kit.loss(logits).backward()
    assert kit.error(inputs.grad.norm(), golden["grad_moved/input/norm"]) <= kit.FLOAT64


@pytest.mark.parametrize("restrict", [False, True], ids=["free", "restricted"])
@pytest.mark.parametrize("name", KITS)
def test_gradients_match_the_official_ones(name, restrict):
    entry = "grad_restrict" if restrict else "grad"
    model, golden = official(name, restrict_gradient=restrict), kit.golden(KITS[name])
    inputs = kit.images("224").requires_grad_()
    loss = kit.loss(model.train()(inputs))
    loss.backward()
    assert kit.error(loss.detach(), golden[f"{entry}/loss"]) <= kit.FLOAT64
    assert kit.error(inputs.grad.norm(), golden[f"{entry}/input/norm"]) <= kit.FLOAT64
    assert kit.error(inputs.grad[0, :, 100:116, 100:116], golden[f"{entry}/input/slice"]) <= kit.FLOAT64
    names = kit.official_names(KITS[name], lambda theirs: saccade.convert_official(theirs, name))
    norms, checked = kit.gradient_norms(KITS[name], entry), 0
    for ours, parameter in model.named_parameters():
        if names[ours] in norms:
            assert abs(parameter.grad.norm().item() / norms[names[ours]] - 1) <= kit.FLOAT64, ours
            checked += 1
    assert checked == len(norms) == len(golden[f"{entry}/params"])


# The authors' files


def test_official_keys_convert_one_to_one():
    for name, count in ((AUGREG, 157), (CLIP, 156)):
        report = saccade.load_checkpoint(saccade.create_model(name), {"model": weights(name)})
        assert (report.source, report.loaded, report.new) == ("sparseformer_btsp (official)", count, {})


@pytest.mark.parametrize("name", KITS)
def test_official_files_are_identified(name):
    assert identify(weights(name)) == (name, {AUGREG: 1000, CLIP: 512}[name])


WIDER = {384: 512, 768: 1024, 1152: 1536, 1536: 2048, 2304: 3072, 3072: 4096}  # base -> large: 1, 3 and 4 times D


@pytest.mark.parametrize(("name", "parameters"), [("augreg_large", 212_426_984), ("clip_large", 212_188_476)])
def test_large_variants_load_files_of_their_shapes(name, parameters):
    """Keys and shapes that the fact sheet gives: those of base, wider, with 16 cortex blocks; its parameter count."""
    base = AUGREG if "augreg" in name else CLIP
    shapes = {key: tuple(WIDER.get(size, size) for size in value.shape) for key, value in weights(base).items()}
    for i in range(11, 19):
        shapes |= {key.replace(".3.", f".{i}.", 1): shape for key, shape in shapes.items() if key[:9] == "layers.3."}
    if base == CLIP:
        shapes |= {"initial_roi.weight": (63, 4), "proj.weight": (768, 1024)}
    theirs = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    assert sum(value.numel() for value in theirs.values()) == parameters
    with torch.device("meta"):
        model = saccade.create_model(f"sparseformer_btsp_{name}")
    converted, report = match_checkpoint(model, theirs)
    assert (len(converted), report.new, report.ignored) == (len(theirs), {}, ())
    del theirs["layers.18.mlp.fc2.bias"]
    with pytest.raises(CheckpointError, match=r"lacks cortex\.blocks\.15\.mlp\.fc2\.bias"):
        match_checkpoint(model, theirs)


def test_spellings_of_the_head_load():
    theirs = weights()
    for part in ("weight", "bias"):
        theirs[f"head.norm.{part}"] = theirs.pop(f"norm.{part}")
        theirs[f"head.classifier.{part}"] = theirs.pop(f"proj.{part}")
    model = saccade.create_model(AUGREG)
    assert saccade.load_checkpoint(model, theirs).loaded == 157
    assert torch.equal(model.head.fc.weight, theirs["head.classifier.weight"])


def test_missing_stage_embedding_is_named():
    theirs = weights()
    del theirs["layers.0.stage_embedding.weight"]
    with pytest.raises(CheckpointError, match=r"lacks focus\.stage_embedding of sparseformer_btsp_augreg_base"):
        saccade.load_checkpoint(saccade.create_model(AUGREG), theirs)


def test_unknown_keys_are_named(caplog):
    theirs = weights() | {name: torch.zeros(1) for name in ("layers.3.extra.weight", "layers.2.norm1.weight", "step")}
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match=r"layers\.3\.extra\.weight"):
        saccade.load_checkpoint(saccade.create_model(AUGREG), theirs)
    assert "layers.3.extra.weight, layers.2.norm1.weight, step" in caplog.text


def test_other_number_of_tokens_loads_all_but_regions():
    model = saccade.create_model(AUGREG, num_tokens=65)
    report = saccade.load_checkpoint(model, weights())
    assert report.new == {"regions": "64 latent tokens, the checkpoint has 48"}
    assert report.loaded == 156


# Parts


@pytest.mark.parametrize("size", [(7, 5), (1, 4)])
def test_border_padding_matches_grid_sample(size):
    features = images(2, 3, *size).double().requires_grad_()
    points = (2 * images(2, 4, 6, 2, seed=1).double()).requires_grad_()
    ours = sample(features, clamp_to_border(points, features))
    theirs = F.grid_sample(features, 2 * points - 1, padding_mode="border", align_corners=False).permute(0, 2, 3, 1)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(theirs)
    for a, b in zip(*(torch.autograd.grad((y * seed).sum(), (features, points)) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_position_follows_its_formula_and_stops_gradients():
    position = RegionPosition(16).double()
    region = torch.tensor([[[0.1, 0.2, 0.7, 0.9]]], dtype=torch.float64, requires_grad=True)
    f = [128 ** (k / 3) for k in range(4)]
    expected = []
    for b in region[0, 0].tolist():
        angle = torch.tensor([torch.pi * b * frequency for frequency in f], dtype=torch.float64)
        expected += [angle[0].sin(), angle[2].sin(), angle[1].cos(), angle[3].cos()]
    torch.testing.assert_close(position.encode(region)[0, 0], torch.stack(expected))
    tokens = torch.zeros(1, 1, 16, dtype=torch.float64, requires_grad=True)
    position(tokens, region).sum().backward()
    assert region.grad is None


def test_initial_regions_are_a_grid_and_the_whole_image():
    regions = padded_region_grid(48)
    assert regions.shape == (48, 4)
    torch.testing.assert_close(regions[1], torch.tensor([0.0, 0.1, 0.5, 0.6]))  # x slowest
    torch.testing.assert_close(regions[35], torch.tensor([0.5, 0.5, 1.0, 1.0]))
    assert torch.equal(regions[36:], torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(12, 1))
    distinct = padded_region_grid(48, "random")
    assert torch.equal(distinct[:36], regions[:36])
    assert len(distinct.unique(dim=0)) == 48
    assert distinct.min() >= 0
    assert distinct.max() <= 1
    assert torch.equal(padded_region_grid(1), torch.tensor([[0.0, 0.0, 0.5, 0.5]]))


def test_randomly_initialised_model_moves_nothing():
    model = SparseFormerV2(num_tokens=11, focus_dim=64, cortex_dim=128, depth=2, extra_regions="random").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(images(1, 3, 64, 64))
    for trace in traces:
        torch.testing.assert_close(trace.regions[0], model.regions.detach())
    grid = model.focus.blocks[0].sampling.tokenizer.placer.grid.detach().view(16, 2)
    torch.testing.assert_close(grid[:2], torch.tensor([[-0.375, -0.375], [-0.125, -0.375]]))  # x fastest


def test_flipped_regions_are_ordered_by_the_adjustment():
    adjuster = small().focus.blocks[0].adjuster
    tokens, region = images(1, 1, 64), torch.tensor([[[0.2, 0.9, 0.6, 0.1]]])
    with torch.no_grad():
        torch.testing.assert_close(adjuster(tokens, region), adjuster(tokens, torch.tensor([[[0.2, 0.1, 0.6, 0.9]]])))


def test_drop_path_rates_grow_over_all_passes():
    model = saccade.create_model(AUGREG, drop_path_rate=0.24)
    rates = torch.tensor([*model.focus.rates, model.resample_rate, *model.cortex.rates])
    torch.testing.assert_close(rates, torch.linspace(0, 0.24, 13))


# Interface


def test_tokens_and_pyramid_leave_out_the_class_token():
    model, inputs = small(), images(2, 3, 64, 48)
    with torch.no_grad():
        everything = model.forward_features(inputs)
        tokens, regions, _ = model.forward_tokens(inputs)
        final, maps = model.forward_intermediates(inputs)
        passes = model.forward_intermediates(inputs, output_fmt="NLC", intermediates_only=True)
    assert torch.equal(everything[:, 1:], tokens)
    assert torch.equal(everything, final)
    assert regions.shape == (2, 10, 4)
    assert [tuple(level.shape) for level in maps] == [(2, 128, 16 >> i, 12 >> i) for i in range(3)] + [(2, 128, 2, 2)]
    shapes = [(10, 64)] * 3 + [(10, 128)] + [(11, 128)] * 4
    assert [tuple(tokens.shape[1:]) for tokens in passes] == shapes


def test_pooling_reads_the_class_token_the_mean_or_every_token():
    tokens = images(2, 11, 128)
    model = small()
    expected = model.head.fc(model.head.norm(tokens))
    torch.testing.assert_close(model.head(tokens), expected[:, 0])
    model.head.global_pool = ""
    torch.testing.assert_close(model.head(tokens), expected)
    model.head.global_pool = "avg"
    torch.testing.assert_close(model.head(tokens), model.head.fc(model.head.norm(tokens[:, 1:].mean(1))))


def test_clip_keeps_a_classifier_without_bias():
    model = saccade.create_model(CLIP)
    assert (model.num_classes, model.head.fc.bias) == (512, None)
    model.reset_classifier(7)
    assert model.head.fc.bias is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(act="relu"), "act must be one of gelu, quick_gelu; got 'relu'"),
        (dict(extra_regions="none"), "extra_regions must be one of whole, random"),
        (dict(global_pool="max"), "global_pool must be one of token, avg"),
        (dict(num_tokens=1), "expected num_tokens >= 2"),
        (dict(repeats=0), "repeats >= 1"),
        (dict(focus_dim=60), r"dim \(60\) must be divisible by 8"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "pure"])
def test_coordinates_stay_float32_in_half_precision(dtype, pure):
    model, inputs = small(), images(2, 3, 64, 64)
    if pure:
        model, inputs = model.to(dtype), inputs.to(dtype)
    with torch.autocast("cpu", dtype, enabled=not pure), saccade.record(model) as traces:
        logits = model(inputs)
    logits.float().square().sum().backward()
    for trace in traces:
        assert (trace.regions.dtype, trace.points.dtype, trace.tokens.dtype) == (torch.float32, torch.float32, dtype)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_explain_draws_regions_per_pass():
    figures = saccade.explain(images(3, 64, 64).sigmoid(), small(), importance=("gradient",))[0]
    assert {"sampling", "responses", "perturbed"} <= set(figures.figures)
    assert figures.arrays["regions/focus.blocks.0.2"].shape == (10, 4)
    assert figures.arrays["points/resample.tokenizer"].shape == (10, 9, 2)
    assert figures.arrays["responses/resample.tokenizer"].shape == (10,)


# Bootstrapping


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(embed_dim=64, depth=6, num_heads=2, img_size=32, num_classes=9)
    model = timm.create_model("vit_tiny_patch16_224", **(sizes | options)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def test_bootstrap_copies_the_last_two_thirds():
    source = vit()
    model = bootstrap(source, num_tokens=5)
    assert len(model.cortex.blocks) == 4
    for k, block in enumerate(model.cortex.blocks):
        theirs = source.blocks[2 + k].state_dict()
        assert set(block.state_dict()) == set(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in block.state_dict().items())
    assert torch.equal(model.head.norm.weight, source.norm.weight)
    assert torch.equal(model.head.fc.weight, source.head.weight)
    assert torch.equal(model.head.fc.bias, source.head.bias)
    assert model.pretrained_cfg["mean"] == source.pretrained_cfg["mean"]
    logits = model(images(2, 3, 40, 56))
    assert logits.shape == (2, 9)
    assert logits.isfinite().all()


def test_bootstrap_cortex_is_the_function_of_the_vit():
    source, tokens = vit(), images(2, 5, 64)
    model = bootstrap(source, num_tokens=5)
    expected = tokens
    for block in source.blocks[2:]:
        expected = block(expected)
    with torch.no_grad():
        ours, _ = model.cortex(tokens, None, None)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)  # LayerNorm eps 1e-6 there, 1e-5 here
    torch.testing.assert_close(model.head(ours), source.head(source.norm(expected[:, 0])), rtol=1e-3, atol=1e-3)


def test_bootstrap_groups_are_new_tuned_and_frozen():
    model = bootstrap(vit(), num_tokens=5)
    groups = model.bootstrap_groups()
    names = [name for name, _ in model.named_parameters()]
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    roots = {group: {".".join(name.split(".")[:3]) for name in of} for group, of in groups.items()}
    assert roots["tuned"] == {"cortex.blocks.0", "cortex.blocks.1"}
    assert roots["frozen"] == {
        *("cortex.blocks.2", "cortex.blocks.3"),
        *(f"head.{layer}.{kind}" for layer in ("norm", "fc") for kind in ("weight", "bias")),
    }
    parts = {"stem", "embeddings", "regions", "class_token", "focus", "bridge", "resample"}
    assert {name.partition(".")[0] for name in groups["new"]} == parts
    model(images(2, 3, 32, 32)).square().sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(groups["new"]) | set(groups["tuned"])
    free = bootstrap(vit(), num_tokens=5, freeze=False)
    assert all(parameter.requires_grad for parameter in free.parameters())


@pytest.mark.parametrize(("name", "blocks"), [(AUGREG, 4), ("sparseformer_btsp_augreg_large", 8)])
def test_groups_of_named_variants_are_those_of_the_paper(name, blocks):
    with torch.device("meta"):
        model = saccade.create_model(name)
    groups = model.bootstrap_groups()
    tuned = {int(name.split(".")[2]) for name in groups["tuned"]}
    frozen = {int(name.split(".")[2]) for name in groups["frozen"] if name.startswith("cortex.")}
    assert tuned == set(range(blocks))
    assert frozen == set(range(blocks, 2 * blocks))


@pytest.mark.parametrize("source", ["vit_base_patch16_224.augreg_in21k_ft_in1k", "vit_base_patch16_clip_quickgelu_224"])
def test_bootstrap_of_the_sources_has_the_named_architecture(source):
    name = CLIP if "clip" in source else AUGREG
    with torch.device("meta"):
        named = saccade.create_model(name)
        ours = bootstrap(source, pretrained=False)
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    if name == CLIP:
        del shapes["head.fc.bias"]  # timm gives CLIP's projection a bias of zeros
    assert {key: value.shape for key, value in named.state_dict().items()} == shapes
    assert [type(block.mlp) for block in ours.cortex.blocks] == [type(block.mlp) for block in named.cortex.blocks]
    assert ours.cortex.blocks[0].attn.num_heads == named.cortex.blocks[0].attn.num_heads


@pytest.mark.parametrize(
    "options",
    [
        dict(init_values=0.5),
        dict(qkv_bias=False),
        dict(class_token=False, global_pool="avg", fc_norm=True),
        dict(class_token=False, global_pool="avg", fc_norm=False),
        dict(pre_norm=True, in_chans=1),
    ],
)
def test_bootstrap_of_other_vits_has_the_function_of_their_blocks(options):
    source, tokens = vit(**options), images(2, 5, 64)
    model = bootstrap(source, num_tokens=5)
    expected = tokens
    for block in source.blocks[2:]:
        expected = block(expected)
    torch.testing.assert_close(model.cortex(tokens, None, None)[0], expected, rtol=1e-3, atol=1e-3)
    assert model.head.global_pool == options.get("global_pool", "token")
    norm = source.fc_norm if options.get("fc_norm") else source.norm
    assert torch.equal(model.head.norm.weight, norm.weight)
    ours = torch.cat([images(2, 1, 64, seed=1), expected], 1) if "class_token" in options else expected
    theirs = source.forward_head(source.norm(expected))
    torch.testing.assert_close(model.forward_head(ours), theirs, rtol=1e-3, atol=1e-3)
    assert model(images(2, options.get("in_chans", 3), 32, 32)).shape == (2, 9)


@pytest.mark.parametrize(
    ("name", "blocks", "width"),
    [
        ("deit_tiny_patch16_224", 8, 96),
        ("vit_small_patch32_224", 8, 192),
        ("vit_base_patch16_gap_224", 8, 384),
        ("deit3_small_patch16_224", 8, 192),
        ("vit_small_patch14_dinov2", 8, 192),
    ],
)
def test_bootstrap_of_timm_vits_by_name(name, blocks, width):
    with torch.device("meta"):
        model = bootstrap(name, pretrained=False)
    assert (len(model.cortex.blocks), model.embeddings.shape[1]) == (blocks, width)
    assert model.card.preprocess.size == (518 if "dinov2" in name else 224)


def test_bootstrap_without_classifier_has_none():
    model = bootstrap(vit(num_classes=0), num_tokens=5)
    assert model.num_classes == 0
    assert model(images(1, 3, 32, 32)).shape == (1, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: timm.create_model("resnet18"), "at least 3 blocks, got ResNet with 0"),
        (lambda: vit(qk_norm=True), "plain timm ViT, got VisionTransformer with attn.k_norm"),
        (lambda: vit(block_fn=ResPostBlock), "plain timm ViT, got VisionTransformer with ResPostBlock"),
        (lambda: vit(reg_tokens=4), "got register tokens, which a SparseFormer v2 does not have"),
        (lambda: vit(final_norm=False), "one LayerNorm after its blocks, got 0"),
        (lambda: vit(norm_layer=timm.layers.RmsNorm), "LayerNorm and Mlp, got VisionTransformer with RmsNorm and Mlp"),
        (lambda: vit(mlp_layer=timm.layers.GluMlp), "LayerNorm and Mlp, got VisionTransformer with LayerNorm and Glu"),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224"), "got a distillation token"),
        (lambda: vit(act_layer=nn.ReLU), "GELU or QuickGELU"),
        (lambda: vit(global_pool="map"), "class token or mean pooling"),
    ],
)
def test_bootstrap_of_unsupported_models_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(make())


def test_bootstrap_rejects_options_of_the_vit():
    with pytest.raises(ValueError, match="depth, num_classes come from the ViT"):
        bootstrap(vit(), num_classes=3, depth=2)


def test_bootstrapped_model_is_loaded_from_its_file_alone(tmp_path):
    source = vit(img_size=64, pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)})
    model = bootstrap(source, num_tokens=5, points=9).eval()
    saccade.save_checkpoint(model, tmp_path / "model.safetensors")
    opened = saccade.load(tmp_path / "model.safetensors")
    inputs = images(2, 3, 64, 64)
    torch.testing.assert_close(opened(inputs), model(inputs))
    assert opened.card == model.card
    assert (opened.card.num_classes, opened.card.preprocess.size) == (9, 64)
    assert opened.card.preprocess.mean == (0.1, 0.2, 0.3)
    opened.reset_classifier(3)
    saccade.save_checkpoint(opened, tmp_path / "three.safetensors")
    assert saccade.load(tmp_path / "three.safetensors").num_classes == 3


def test_bootstrapped_model_round_trips_through_a_checkpoint(tmp_path):
    model = bootstrap(vit(), num_tokens=5)
    saccade.save_checkpoint(model, tmp_path / "model.safetensors")
    other = bootstrap(vit(), num_tokens=5)
    assert saccade.load_checkpoint(other, tmp_path / "model.safetensors").new == {}
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_bootstrap_is_public():
    assert saccade.bootstrap is bootstrap
