"""SparseFormer against the authors' implementation in float64 (parity kit sparseformer_v1_tiny), and its options."""

import logging
import warnings
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import saccade
from saccade.models.checkpoint import identify
from saccade.ops.roi_sampling import sample
from saccade.weights.read import CheckpointError
from tests.parity import kit

VARIANT, NAME = "sparseformer_v1_tiny", "sparseformer_tiny"


@cache
def filled() -> dict[str, torch.Tensor]:
    return kit.weights(VARIANT)


def weights() -> dict[str, torch.Tensor]:
    """The kit's weights under the authors' names, a new dict each time."""
    return dict(filled())


def official(**options) -> nn.Module:
    model = saccade.create_model(NAME, **options)
    saccade.load_checkpoint(model, weights())
    return model.double().eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return official()


def awake(**options) -> nn.Module:
    """Return a small model with random zero-initialised layers: tokens shift their points and move their regions."""
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", num_classes=5, **options).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("to_delta.weight", "to_offset.weight")):
            nn.init.normal_(parameter, std=0.3)
        elif name.endswith("to_weights.weight"):
            nn.init.normal_(parameter, std=0.02)
    return model


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Parity with the authors' code


def test_kit_weights_have_the_expected_sums():
    sums = torch.stack([value.double().sum() for value in weights().values()])
    torch.testing.assert_close(sums, kit.golden(VARIANT)["weights/sum"], rtol=1e-9, atol=1e-9)


@pytest.mark.shows("SF-23", "SF-25", "SF-27", "SF-28", "SF-29")
@pytest.mark.parametrize("size", kit.INPUTS)
def test_logits_match_the_authors_code(model, size):
    with torch.no_grad():
        assert kit.error(model(kit.images(size)), kit.golden(VARIANT)[f"logits/{size}"]) <= kit.FLOAT64


@pytest.mark.shows("SF-19")
def test_flipped_regions_are_ordered_by_the_first_adjustment(model):
    """Shifts and growths are relative to the absolute size, as in the authors' code, so swapped ends change nothing."""
    regions = model.regions.data.clone()
    with torch.no_grad():
        expected = model(kit.images("160x256"))
        model.regions.data[::2] = regions[::2][:, [2, 1, 0, 3]]  # x0 and x1 swapped
        flipped = model(kit.images("160x256"))
        model.regions.data.copy_(regions)
    torch.testing.assert_close(flipped, expected)


def test_logits_in_float32_are_within_float32_rounding(model):
    with torch.no_grad():
        logits = model.float()(kit.images("160x256").float())
    model.double()
    assert kit.error(logits, kit.golden(VARIANT)["logits/160x256"]) <= 2e-4


@pytest.mark.shows("SF-11", "SF-18", "SF-22", "SF-26", "SF-30", "SF-31", "SF-32")
def test_every_step_matches_the_authors_code(model):
    """Regions, points, samples, mixing and tokens of every pass."""
    golden, mixed = kit.golden(VARIANT), []
    tokenizers = [model.focus.blocks[0].tokenizer, model.cortex.blocks[0].tokenizer]
    hooks = [tokenizer.decoder.register_forward_hook(lambda *call: mixed.append(call[-1])) for tokenizer in tokenizers]
    with torch.no_grad(), saccade.record(model) as traces:
        passes = model.forward_intermediates(kit.images("224"), output_fmt="NLC", intermediates_only=True)
        features = model.stem(kit.images("224"))
    for hook in hooks:
        hook.remove()
    assert (len(traces), len(mixed), len(passes)) == (5, 5, 12)
    kit.check_summary(VARIANT, "stem", features)
    for i, (trace, mixing) in enumerate(zip(traces, mixed, strict=True)):
        assert kit.error(trace.regions, golden[f"roi/{i}"]) <= kit.FLOAT64
        points = golden[f"points/{i}"]
        assert kit.error(trace.points[0, : len(points)], points) <= kit.FLOAT64
        kit.check_summary(VARIANT, f"mixing/{i}", mixing)
    sampled = sample(features, traces[0].points)[0, :4, :, :8]
    assert kit.error(sampled, golden["sampled/0"]) <= kit.FLOAT64
    for i, tokens in enumerate(passes):
        kit.check_summary(VARIANT, f"tokens/{i}", tokens)


def check_gradients(model: nn.Module, entry: str) -> None:
    golden, inputs = kit.golden(VARIANT), kit.images("224").requires_grad_()
    loss = kit.loss(model.train()(inputs))
    loss.backward()
    assert kit.error(inputs.grad.norm(), golden[f"{entry}/input/norm"]) <= kit.FLOAT64
    assert kit.error(inputs.grad[0, :, 100:116, 100:116], golden[f"{entry}/input/slice"]) <= kit.FLOAT64
    if f"{entry}/params" in golden:
        assert kit.error(loss.detach(), golden[f"{entry}/loss"]) <= kit.FLOAT64
        names = kit.official_names(VARIANT, lambda theirs: saccade.convert_official(theirs, NAME))
        norms, checked = kit.gradient_norms(VARIANT, entry), 0
        for ours, parameter in model.named_parameters():
            if names[ours] in norms:
                assert abs(parameter.grad.norm().item() / norms[names[ours]] - 1) <= kit.FLOAT64, ours
                checked += 1
        assert checked == len(norms) > 150


def test_gradients_match_the_authors_code():
    check_gradients(official(restrict_gradient=False), "grad")


@pytest.mark.shows("SF-12")
def test_restricted_gradients_match_the_authors_code():
    check_gradients(official(), "grad_restrict")


def test_training_code_constants_match_the_authors_code():
    model = official(training_code=True)
    with torch.no_grad():
        logits = model(kit.images("224"))
    assert kit.error(logits, kit.golden(VARIANT)["logits_training_code/224"]) <= kit.FLOAT64
    assert kit.error(logits, kit.golden(VARIANT)["logits/224"]) > 1e-3


@pytest.mark.slow
def test_training_code_gradients_match_the_authors_code():
    check_gradients(official(training_code=True), "grad_training_code")


# The authors' files


@pytest.mark.parametrize(("spelling", "prefix"), [("norm.", "module."), ("head.norm.", "")])
def test_both_names_of_the_head_load(spelling, prefix):
    theirs = weights()
    for part in ("weight", "bias"):
        theirs[spelling + part] = theirs.pop("norm." + part)
    model = saccade.create_model(NAME)
    report = saccade.load_checkpoint(model, {"model": {prefix + name: value for name, value in theirs.items()}})
    assert (report.source, report.loaded, report.new) == ("sparseformer (official)", 154, {})
    assert torch.equal(model.head.norm.weight, theirs[spelling + "weight"])


def test_unknown_keys_are_reported(caplog):
    strangers = ["layers.3.mystery.weight", "proj2.weight", "layers.0.attn.rpb", "ema_step", "layers.1.2.weight"]
    theirs = weights() | {name: torch.zeros(1) for name in strangers}
    with caplog.at_level(logging.WARNING):
        converted = saccade.convert_official(theirs, NAME)
    assert all(name in caplog.text and name in converted for name in strangers)
    with pytest.raises(CheckpointError, match=r"layers\.3\.mystery\.weight"):
        saccade.load_checkpoint(saccade.create_model(NAME), theirs)


def test_identify_names_the_model_of_a_checkpoint():
    assert identify(weights()) == (NAME, 1000)


@pytest.mark.shows("SF-53")
def test_more_tokens_reinitialise_only_embeddings_and_regions():
    """Fine-tuning with 81 tokens where the file has 49."""
    model = saccade.create_model(NAME, num_tokens=81)
    embeddings, regions = model.embeddings.clone(), model.regions.clone()
    report = saccade.load_checkpoint(model, weights())
    assert report.new == dict.fromkeys(("embeddings", "regions"), "81 latent tokens, the checkpoint has 49")
    assert torch.equal(model.embeddings, embeddings)
    assert torch.equal(model.regions, regions)
    converted = saccade.convert_official(weights(), NAME)
    loaded = [name for name, value in model.state_dict().items() if name not in report.new]
    assert len(loaded) == report.loaded == 152
    assert all(torch.equal(model.state_dict()[name], converted[name]) for name in loaded)


def test_features_only_loads_a_classifier_checkpoint():
    model = saccade.create_model(NAME, features_only=True, dense=True)
    report = saccade.load_checkpoint(model, weights())
    assert {name.partition(".")[0] for name in report.new} == {"locate"}
    assert {name.partition(".")[0] for name in report.ignored} == {"head"}
    again = saccade.create_model(NAME, features_only=True, dense=True)
    assert saccade.load_checkpoint(again, model.model.state_dict()).new == {}


# Outputs


def test_dense_features_are_the_tokens_of_their_regions():
    """At the centre of its region, the map is nearest to the token."""
    model, inputs = awake(num_tokens=4, region_init="cell"), images(1, 3, 64, 64)
    with torch.no_grad():
        tokens, regions, _ = model.forward_tokens(inputs)
        final, maps = model.forward_intermediates(inputs)
        dense = maps[0][0]
    assert torch.equal(final, tokens)
    place = regions[0, 0].view(2, 2).mean(0)  # x y of the first token's centre
    column, row = (place.clamp(0, 0.99) * 16).long().tolist()
    nearest = (dense[:, row, column] - tokens[0]).norm(dim=-1)
    assert nearest.argmin() == 0
    for fine, coarse in pairwise(maps):
        torch.testing.assert_close(coarse, F.avg_pool2d(fine, 2))


def test_features_only_is_a_function_of_the_checkpoint():
    model, inputs = awake(), images(1, 3, 64, 64)
    with torch.no_grad():
        maps = model.forward_intermediates(inputs, intermediates_only=True)
        for seed in (1, 2):
            torch.manual_seed(seed)
            extractor = saccade.create_model("sparseformer_nano", features_only=True).eval()
            report = saccade.load_checkpoint(extractor, model.state_dict())
            assert report.new == {}
            for level, expected in zip(extractor(inputs), maps, strict=True):
                torch.testing.assert_close(level, expected)


def test_dense_option_warns_until_it_is_trained():
    model = saccade.create_model("sparseformer_nano", features_only=True, dense=True)
    with pytest.warns(UserWarning, match="are not trained.*dense=False"):
        model.eval()
    sum(level.square().mean() for level in model(images(2, 3, 64, 64))).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    loaded = saccade.create_model("sparseformer_nano", features_only=True, dense=True)
    saccade.load_checkpoint(loaded, model.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()
        loaded.eval()


def test_dense_option_trains_its_features():
    model = saccade.create_model("sparseformer_nano", features_only=True, dense=True)
    sum(level.square().mean() for level in model(images(2, 3, 64, 64))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert model.model.locate.to_key.weight.grad.norm() > 0
    assert "locate" not in "".join(saccade.create_model("sparseformer_nano").state_dict())


def test_intermediates_are_the_tokens_of_every_pass():
    model, inputs = awake(), images(2, 3, 64, 64)
    with torch.no_grad():
        final, passes = model.forward_intermediates(inputs, output_fmt="NLC")
        last = model.forward_intermediates(inputs, indices=[0, 9], output_fmt="NLC", intermediates_only=True)
    assert [tuple(tokens.shape[1:]) for tokens in passes] == [(36, 128)] * 4 + [(36, 192)] * 6
    assert torch.equal(passes[-1], final)
    assert torch.equal(last[0], passes[0])
    assert torch.equal(last[1], passes[9])
    with pytest.raises(ValueError, match="output_fmt must be one of NCHW, NLC; got 'NHWC'"):
        model.forward_intermediates(inputs, output_fmt="NHWC")


@pytest.mark.shows("SF-78")
def test_head_without_pooling_classifies_every_token():
    model, inputs = awake(), images(2, 3, 64, 64)
    with torch.no_grad():
        tokens = model.forward_features(inputs)
        expected = torch.stack([model.forward_head(tokens[:, i : i + 1]) for i in range(36)], 1)
        model.reset_classifier(5, "")
        model.head.fc.load_state_dict(awake().head.fc.state_dict())
        logits = model(inputs)
    torch.testing.assert_close(logits, expected)


# Options


@pytest.mark.shows("SF-38")
def test_zero_repeats_sample_once_at_fixed_points():
    """Table 3b: no focusing, regions and points fixed and not learnable."""
    model = saccade.create_model("sparseformer_nano", repeats=0, num_classes=5).eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(images(2, 3, 64, 64))
    (trace,) = traces
    assert torch.equal(trace.points[0], trace.points[1])
    assert torch.equal(trace.regions[0], model.regions)
    learned = dict(model.named_parameters())
    assert "regions" not in learned
    assert not any("placer" in name or "adjuster" in name or "focus" in name for name in learned)
    assert "regions" in model.state_dict()
    model(images(2, 3, 64, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in learned.values())


@pytest.mark.shows("SF-24")
@pytest.mark.parametrize("repeats", [1, 3])
def test_every_repeat_samples_again(repeats):
    model = awake(repeats=repeats)
    with torch.no_grad(), saccade.record(model) as traces:
        model(images(1, 3, 64, 64))
    assert [trace.step for trace in traces] == [*range(repeats), 0]
    assert (traces[0].regions - traces[-1].regions).abs().max() > 1e-3


@pytest.mark.shows("SF-31", "SF-33")
@pytest.mark.parametrize(("option", "grid"), [("early_conv", (12, 18)), ("vit8", (6, 9)), ("rgb", (48, 70))])
def test_image_features_have_the_expected_grid(option, grid):
    model, inputs = awake(image_features=option), images(2, 3, 48, 70)
    with torch.no_grad(), saccade.record(model) as traces:
        alone, batch = model(inputs[:1]), model(inputs)
    assert traces[0].size == grid
    torch.testing.assert_close(batch[:1], alone, rtol=1e-4, atol=1e-4)
    maps = model.forward_intermediates(inputs, intermediates_only=True)
    assert [tuple(level.shape[2:]) for level in maps] == [(12, 18), (6, 9), (3, 5), (2, 3)]
    dense = saccade.create_model("sparseformer_nano", image_features=option, features_only=True)
    assert [tuple(level.shape[2:]) for level in dense(inputs)] == [(12, 18), (6, 9), (3, 5), (2, 3)]


@pytest.mark.shows("SF-32")
def test_early_features_are_normalised_per_pixel():
    features = awake().stem(images(1, 3, 64, 64))
    torch.testing.assert_close(features.mean(1), torch.zeros(1, 16, 16), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.var(1, unbiased=False), torch.ones(1, 16, 16), atol=1e-3, rtol=0)


@pytest.mark.shows("SF-16")
@pytest.mark.parametrize("decoding", ["adaptive", "static", "linear"])
def test_every_decoding_trains(decoding):
    model = awake(decoding=decoding)
    model(images(2, 3, 64, 64)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    generators = [name for name, _ in model.named_parameters() if "to_weights" in name]
    assert len(generators) == (4 if decoding == "adaptive" else 0)


@pytest.mark.shows("SF-51")
def test_drop_path_rates_rise_over_passes():
    """12 rates for Tiny: its one focusing block runs four times."""
    model = saccade.create_model(NAME, drop_path_rate=0.2)
    rates = torch.tensor(model.focus.rates + model.cortex.rates)
    torch.testing.assert_close(rates, torch.linspace(0, 0.2, 12))
    assert len(model.focus.rates) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(image_features="hsv"), "image_features must be one of early_conv, vit8, rgb; got 'hsv'"),
        (dict(decoding="none"), "decoding must be one of adaptive, static, linear"),
        (dict(region_init="third"), "region_init must be one of half, cell, whole"),
        (dict(global_pool="max"), "global_pool must be one of avg"),
        (dict(num_tokens=0), "expected num_tokens >= 1"),
        (dict(heads=7), r"must be divisible by num_heads \(7\)"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        saccade.create_model("sparseformer_nano", **options)


# Precision


@pytest.mark.shows("SF-12")
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "pure"])
def test_coordinates_stay_float32_in_half_precision(dtype, near, pure):
    model, inputs = awake(), images(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(inputs)
    if pure:
        model, inputs = model.to(dtype), inputs.to(dtype)
    with torch.autocast("cpu", dtype, enabled=not pure), saccade.record(model) as traces:
        logits = model(inputs)
    logits.float().square().sum().backward()
    for trace in traces:
        assert (trace.regions.dtype, trace.points.dtype, trace.tokens.dtype) == (torch.float32, torch.float32, dtype)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert (logits.float() - expected).abs().max() <= near * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_authors_weights_are_finite_in_half_precision(model, dtype):
    with torch.no_grad(), torch.autocast("cpu", dtype):
        logits = model.float()(kit.images("160x256").float())
    model.double()
    assert kit.error(logits, kit.golden(VARIANT)["logits/160x256"]) <= (0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.shows("SF-12")
def test_scaled_loss_gives_scaled_gradients():
    """As with a GradScaler: the bound on the gradients of points is scaled with the loss."""
    model, inputs = awake().double().train(), images(2, 3, 64, 64).double()
    plain = torch.autograd.grad(100 * model(inputs).square().sum(), list(model.parameters()))
    model.set_loss_scale(1024.0)
    scaled = torch.autograd.grad(1024 * 100 * model(inputs).square().sum(), list(model.parameters()))
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(b / 1024, a)
    free = awake(restrict_gradient=False).double().train()
    unbound = torch.autograd.grad(100 * free(inputs).square().sum(), free.regions)[0]
    assert (unbound - plain[1]).norm() > 0.1 * unbound.norm()  # the bound was reached
    assert [name for name, _ in model.named_parameters()][1] == "regions"


def test_new_loss_scale_does_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    tokenizer = awake().focus.blocks[0].tokenizer
    compiled = torch.compile(tokenizer, fullgraph=True, backend=counter)
    inputs = images(1, 36, 128), awake().regions.detach()[None], images(1, 48, 16, 16)
    for scale in (1.0, 65536.0, 32768.0):
        tokenizer.loss_scale.fill_(scale)
        compiled(*inputs)[0].sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()


# Initialisation (appendix A.3)


@pytest.mark.shows("SF-02")
def test_tokens_are_trainable_embeddings_and_regions_without_position():
    """Embeddings and regions are parameters; equal embeddings in equal regions stay equal, wherever in the list."""
    model, inputs = awake(num_tokens=9, region_init="whole"), images(1, 3, 64, 64)
    assert {"embeddings", "regions"} <= set(dict(model.named_parameters()))
    with torch.no_grad():
        model.embeddings.copy_(model.embeddings[:1].expand_as(model.embeddings))
        tokens, regions, _ = model.forward_tokens(inputs)
    torch.testing.assert_close(tokens, tokens[:, :1].expand_as(tokens))
    torch.testing.assert_close(regions, regions[:, :1].expand_as(regions))


@pytest.mark.shows("SF-42")
def test_linear_layers_start_with_a_truncated_normal_and_zero_bias():
    """Standard deviation 0.02, at most 2 (100 deviations); layers with their own initialisation are excluded."""
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_small")  # large enough for timm's trunc_normal_ to overflow to 2
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("to_offset", "to_delta", "to_weights"))
    }
    assert len(layers) == 42
    for name, layer in layers.items():
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05), name
        assert layer.weight.abs().max() < 0.15
        assert layer.bias is None or not layer.bias.any(), name


@pytest.mark.shows("SF-48")
def test_norms_before_region_layers_start_small_and_embeddings_with_unit_deviation():
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_tiny")
    small = ("placer.norm", "adjuster.norm", "decoder.norm")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert sum(name.endswith(small) for name in norms) == 6
    for name, norm in norms.items():
        gain = norm.normalized_shape[0] ** -0.5 if name.endswith(small) else 1.0
        torch.testing.assert_close(norm.weight, torch.full_like(norm.weight, gain))
        assert not norm.bias.any()
    assert model.embeddings.std().item() == pytest.approx(0.88, rel=0.03)  # unit normal, truncated at 2
    assert model.embeddings.abs().max() <= 2
    conv = model.stem.conv
    assert conv.weight.std().item() == pytest.approx((2 / (96 * 49)) ** 0.5, rel=0.03)
    assert not conv.bias.any()


@pytest.mark.shows("SF-85")
def test_memory_of_tokens_does_not_depend_on_the_image_size():
    """What backward needs of everything after the early convolution, besides the convolution's output itself."""
    model, saved = saccade.create_model("sparseformer_nano").train(), {}
    for side in (64, 128, 256):
        features = model.stem(torch.randn(2, 3, side, side)).detach().requires_grad_()
        sizes = {}

        def pack(tensor, sizes=sizes, features=features):
            if tensor.untyped_storage().data_ptr() != features.untyped_storage().data_ptr():
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            tokens, _, _ = model.sample_features(features)
        saved[side] = sum(sizes.values())
        tokens.sum().backward()
        assert features.grad.shape == features.shape
    assert saved[64] == saved[128] == saved[256] > 0
