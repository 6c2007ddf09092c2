"""VT-FPN: tokens of all levels through one transformer, and back onto every level; against the authors' module."""

from functools import cache

import pytest
import torch
from torch import nn

import saccade
from saccade.heads.fpn import FPN
from saccade.heads.vt_fpn import VTPyramid, VTPyramidLayer, vt_fpn_head
from saccade.layers.relation import VisualTokenTransformer
from saccade.models.official import vt_fpn
from saccade.weights.read import CheckpointError
from tests.parity import kit
from tests.parity.fill import fill, image, noise

CHANNELS = (256, 512, 1024, 2048)
KITS = {
    "d2go_vt_fpn_r50": dict(layers=3, num_tokens=(16, 16, 8, 8)),
    "d2go_vt_fpn_r50_one": dict(num_tokens=8),
    "d2go_vt_fpn_r50_pos": dict(layers=2, num_tokens=(16, 16, 8, 8), positions=((16, 2), (16, 1), (8, 1), (8, 0))),
}
SIZES = {
    "128x192": (700, ((32, 48), (16, 24), (8, 12), (4, 6))),
    "100x132": (800, ((25, 33), (13, 17), (7, 9), (4, 5))),
}


@cache
def official(variant):
    return fill(kit.keys(variant))


def make_neck(variant):
    neck = VTPyramid(CHANNELS, **KITS[variant])
    report = saccade.load_checkpoint(neck, {f"backbone.{key}": value for key, value in official(variant).items()})
    assert (report.source, report.new, report.ignored) == ("vt_fpn (official)", {}, ())
    return neck.double().eval()


def inputs(size):
    seed, sides = SIZES[size]
    return [image((2, c, *side), seed + i).double() for i, (c, side) in enumerate(zip(CHANNELS, sides, strict=True))]


def check_outputs(variant, name, outputs):
    for i, output in enumerate(outputs):
        kit.check_summary(variant, f"{name}/{i}", output)


def in_official_layout(variant, neck, ours):
    """Tensors by our names -> flat tensors by official names, by converting the official tensors' element numbers."""
    rows = kit.keys(variant)
    indices, start = {}, 0
    for name, shape, _, _ in rows:
        count = torch.Size(shape).numel()
        indices[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(shape)
        start += count
    flat = torch.full((start,), torch.nan, dtype=torch.float64)
    for name, number in vt_fpn.convert(indices, neck).items():
        if name in ours:
            flat[number.flatten().long()] = ours[name].double().flatten()
    return dict(zip((row[0] for row in rows), flat.split([torch.Size(row[1]).numel() for row in rows]), strict=True))


def check_gradients(variant, entry, neck):
    pyramid = [features.requires_grad_() for features in inputs("128x192")]
    outputs = neck(pyramid)
    loss = sum((out * noise(f"loss.{i}", out.shape) / 100).sum() for i, out in enumerate(outputs))
    loss.backward()
    golden = kit.golden(variant)
    assert kit.error(loss.detach()[None], golden[f"{entry}/loss"][None]) <= kit.FLOAT64
    for i, features in enumerate(pyramid):
        assert kit.error(features.grad[0, :3, :4, :4], golden[f"{entry}/input{i}/slice"]) <= kit.FLOAT64
        assert kit.error(features.grad.norm()[None], golden[f"{entry}/input{i}/norm"][None]) <= kit.FLOAT64
    gradients = {name: parameter.grad for name, parameter in neck.named_parameters()}
    theirs = in_official_layout(variant, neck, gradients)
    expected = kit.gradient_norms(variant, entry)
    assert len(expected) > 80
    for name, norm in expected.items():
        assert theirs[name].norm().item() == pytest.approx(norm, rel=kit.FLOAT64), name
    return outputs


@pytest.mark.shows("VTR-01", "VTR-03", "VTR-13")
@pytest.mark.parametrize("variant", KITS)
def test_outputs_and_tokens_match_the_authors_code(variant):
    neck, tokens = make_neck(variant), {}
    rows = kit.golden(variant)["weights/sum"]
    sums = torch.stack([value.double().sum() for value in official(variant).values()])
    torch.testing.assert_close(sums, rows, rtol=1e-9, atol=1e-9)
    for i, layer in enumerate(neck.layers):
        for level, tokenizer in enumerate(layer.tokenizers):
            tokenizer.register_forward_hook(lambda _, __, out, n=f"grouped/{i}.{level}": tokens.__setitem__(n, out[0]))
            if tokenizer.to_token.position is not None:
                tokenizer.to_token.position.register_forward_hook(
                    lambda _, __, out, n=f"pos/{i}.{level}": tokens.__setitem__(n, out)
                )
    with torch.no_grad():
        check_outputs(variant, "out/128x192", neck([features.clone() for features in inputs("128x192")]))
    assert len(tokens) == 4 * len(neck.layers) * (2 if "pos" in variant else 1)
    for name, value in tokens.items():
        kit.check_summary(variant, name, value)


@pytest.mark.parametrize("variant", ["d2go_vt_fpn_r50", "d2go_vt_fpn_r50_one"])
def test_odd_sizes_match_the_authors_code(variant):
    with torch.no_grad():
        check_outputs(variant, "out/100x132", make_neck(variant)(inputs("100x132")))


def test_assignments_match_the_authors_code():
    """Of tokens over pixels, before the token map; and their entropy."""
    variant = "d2go_vt_fpn_r50_one"
    neck, golden = make_neck(variant), kit.golden(variant)
    with torch.no_grad():
        for level, (tokenizer, features) in enumerate(zip(neck.layers[0].tokenizers, inputs("128x192"), strict=True)):
            assignment = tokenizer(features)[1][0]  # (M, N)
            entropy = -(assignment * assignment.log()).sum(-1)
            assert kit.error(assignment[None, :8, :64], golden[f"assign/0.{level}/slice"]) <= kit.FLOAT64
            assert kit.error(entropy[None], golden[f"assign/0.{level}/entropy"]) <= kit.FLOAT64


@pytest.mark.shows("VTR-01")
@pytest.mark.parametrize("variant", KITS)
def test_gradients_match_the_authors_code(variant):
    check_gradients(variant, "grad", make_neck(variant))


@pytest.mark.shows("VTR-01", "VTR-03")
@pytest.mark.parametrize("variant", KITS)
def test_batch_statistics_and_their_gradients_match_the_authors_code(variant):
    """In training mode, which shows norms that evaluation could fold into their neighbours."""
    neck = make_neck(variant).train()
    outputs = check_gradients(variant, "train_bn/grad", neck)
    check_outputs(variant, "train_bn/out", [output.detach() for output in outputs])
    theirs = in_official_layout(variant, neck, dict(neck.named_buffers()))
    names = [name for name, _, _, sort in kit.keys(variant) if sort == "buffer"]
    expected = dict(zip(names, kit.golden(variant)["train_bn/buffers"].tolist(), strict=True))
    for name in names:
        if not name.endswith("num_batches_tracked"):
            assert theirs[name].sum().item() == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    assert {neck.get_buffer(name).item() for name in neck.state_dict() if name.endswith("tracked")} == {1}


def test_official_vt_fpn_in_another_model_is_refused():
    with pytest.raises(CheckpointError, match="got vt_fpn weights of another size or options"):
        saccade.load_checkpoint(saccade.create_model("vt_nano"), official("d2go_vt_fpn_r50_one"))


@pytest.mark.shows("VTR-13")
@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        (dict(num_tokens=(16, 16, 8, 8)), 10_611_296),
        (dict(num_tokens=8), 10_605_120),
        (dict(num_tokens=(16, 16, 8, 8), layers=3), 25_746_016),
    ],
)
def test_parameters_are_those_of_the_authors_code(options, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in VTPyramid(CHANNELS, **options).parameters()) == parameters


def make_pyramid(channels=(16, 32, 64, 128)):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, c, 16 // 2**i, 24 // 2**i, generator=rng) for i, c in enumerate(channels)]


def start_norms_at_one(module):
    """The authors start the norms of residual paths at zero, which hides what they carry."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.ones_(norm.weight)


@pytest.mark.shows("VT-67", "VTR-01")
def test_neck_starts_as_its_1x1_convolutions():
    """Zero-initialised norms: a level that already has `dim` channels passes unchanged. Shapes are FPN's."""
    pyramid = make_pyramid()
    channels = [features.shape[1] for features in pyramid]
    neck = VTPyramid(channels, 16, token_dim=32, num_tokens=2, num_heads=4).eval()
    outputs = neck(pyramid)
    assert [m.shape for m in outputs] == [m.shape for m in FPN(channels, 16)(pyramid)]
    torch.testing.assert_close(outputs[0], pyramid[0])


@pytest.mark.shows("VT-64", "VT-65", "VT-66", "VTR-13")
def test_layer_groups_relates_and_projects():
    """One tokenizer and projector per level, one transformer over the concatenation, tokens split back per level."""
    torch.manual_seed(0)
    pyramid, counts = make_pyramid(), [5, 4, 3, 2]
    layer = VTPyramidLayer([16, 32, 64, 128], 16, 32, counts, 4, first=True).eval()
    start_norms_at_one(layer)
    with torch.no_grad():
        tokens = [tokenizer(x)[0] for tokenizer, x in zip(layer.tokenizers, pyramid, strict=True)]
        assert [t.shape[1] for t in tokens] == counts
        related = layer.relation(torch.cat(tokens, 1))
        starts = [0, 5, 9, 12]
        levels = [related[:, start : start + count] for start, count in zip(starts, counts, strict=True)]
        expected = [p(x, t) for p, x, t in zip(layer.projectors, pyramid, levels, strict=True)]
        outputs, new_tokens = layer(pyramid, None)
    assert [type(m) for m in layer.relation.modules()].count(VisualTokenTransformer) == 1
    for output, reference in zip(outputs + new_tokens, expected + levels, strict=True):
        torch.testing.assert_close(output, reference)


@pytest.mark.shows("VT-65")
def test_levels_exchange_information_through_tokens():
    torch.manual_seed(0)
    neck = VTPyramid([16, 16], 16, token_dim=32, num_tokens=2, num_heads=4).eval()
    start_norms_at_one(neck)
    fine, coarse = torch.randn(1, 16, 8, 8), torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        before, after = neck([fine, coarse])[0], neck([fine, coarse + 1])[0]
    assert (before - after).abs().max() > 1e-3


def test_second_layer_reads_the_maps_and_tokens_of_the_first():
    torch.manual_seed(0)
    neck = VTPyramid((16, 32), 16, token_dim=32, num_tokens=3, num_heads=4, layers=2).eval()
    pyramid = make_pyramid()[:2]
    start_norms_at_one(neck)
    with torch.no_grad():
        maps, tokens = neck.layers[0](pyramid, None)
        expected, _ = neck.layers[1](maps, tokens)
        unrelated, _ = neck.layers[1](maps, [t.flip(1) + 1 for t in tokens])
        outputs = neck(pyramid)
    for output, reference, other in zip(outputs, expected, unrelated, strict=True):
        torch.testing.assert_close(output, reference)
        assert (output - other).abs().max() > 1e-4


@pytest.mark.shows("VT-64")
def test_defaults_are_8_tokens_of_1024_channels_per_level():
    neck = vt_fpn_head((256, 512, 1024, 2048), 20).neck
    (layer,) = neck.layers
    assert layer.num_tokens == [8, 8, 8, 8]
    assert [tokenizer(torch.randn(2, c, 4, 4))[0].shape for tokenizer, c in zip(
        layer.tokenizers, (256, 512, 1024, 2048), strict=True)] == [(2, 8, 1024)] * 4  # fmt: skip


def test_wrong_number_of_token_counts_is_refused():
    with pytest.raises(ValueError, match=r"num_tokens must be one number or 2, one per level; got \(8, 8, 8\)"):
        VTPyramid((16, 32), num_tokens=(8, 8, 8))
