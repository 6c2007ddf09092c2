"""The PaCa head against the authors' code (parity kit `paca_head`, in float64) and against PaCa Eqs. 9-14."""

from functools import cache

import pytest
import torch

import saccade
from saccade.heads.paca import PaCaHead
from saccade.models.official import heads
from tests.parity import kit
from tests.parity.fill import fill, image, noise

VARIANT, CHANNELS = "paca_head", (96, 192, 320, 384)
SIZES = {
    "128x128": (500, ((32, 32), (16, 16), (8, 8), (4, 4))),
    "100x132": (600, ((25, 33), (13, 17), (7, 9), (4, 5))),
}


def to_ours(official):
    return heads.convert("paca", {f"decode_head.{key}": value for key, value in official.items()})


@cache
def official():
    return fill(kit.keys(VARIANT))


def make_head():
    head = PaCaHead(CHANNELS, 150)
    head.load_state_dict(to_ours(official()))
    return head.double().eval()


def pyramid(size):
    seed, sides = SIZES[size]
    return [image((2, c, *side), seed + i).double() for i, (c, side) in enumerate(zip(CHANNELS, sides, strict=True))]


@pytest.mark.parametrize("size", SIZES)
def test_logits_and_scores_match_the_authors_code(size):
    with torch.no_grad():
        logits, scores = make_head()(pyramid(size))
    kit.check_summary(VARIANT, f"logits/{size}", logits)
    kit.check_summary(VARIANT, f"c_raw/{size}", scores)


def test_inner_tensors_match_the_authors_code():
    head, outputs = make_head(), {}
    for name in ("to_query", "to_key", "to_value", "mix"):
        head.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    with torch.no_grad():
        head(pyramid("128x128"))
    kit.check_summary(VARIANT, "q", outputs["to_query"].flatten(2).transpose(1, 2))
    kit.check_summary(VARIANT, "k", outputs["to_key"])
    kit.check_summary(VARIANT, "v", outputs["to_value"])
    kit.check_summary(VARIANT, "proj", outputs["mix"])


def test_gradients_match_the_authors_code():
    head, maps = make_head(), [features.requires_grad_() for features in pyramid("128x128")]
    logits, scores = head(maps)
    loss = kit.loss(logits) + (scores * noise("loss.c_raw", scores.shape).double() / 100).sum()
    loss.backward()
    golden = kit.golden(VARIANT)
    assert kit.error(loss.detach()[None], golden["grad/loss"][None]) <= kit.FLOAT64
    for i, features in enumerate(maps):
        assert kit.error(features.grad[0, :3, :4, :4], golden[f"grad/input{i}/slice"]) <= kit.FLOAT64
        assert kit.error(features.grad.norm()[None], golden[f"grad/input{i}/norm"][None]) <= kit.FLOAT64
    names = kit.official_names(VARIANT, to_ours)
    expected = kit.gradient_norms(VARIANT)
    assert len(expected) == 33
    for name, parameter in head.named_parameters():
        norm = parameter.grad.norm().item()
        assert norm == pytest.approx(expected[names[name]], rel=kit.FLOAT64), name


def test_batch_statistics_match_the_authors_code():
    head = make_head().train()
    head.classifier.drop.eval()
    with torch.no_grad():
        logits, _ = head(pyramid("128x128"))
    kit.check_summary(VARIANT, "train_bn/logits", logits)
    ours = {theirs: head.state_dict()[name] for name, theirs in kit.official_names(VARIANT, to_ours).items()}
    sums = [ours[name].sum().double() for name, _, _, sort in kit.keys(VARIANT) if sort == "buffer"]
    assert kit.error(torch.stack(sums), kit.golden(VARIANT)["train_bn/buffers"]) <= kit.FLOAT64


@pytest.mark.shows("PACA-47", "PACA-48", "PACA-49", "PACA-50")
def test_head_equals_eqs_9_to_14_written_out():
    """For one image and one level."""
    torch.manual_seed(0)
    head = PaCaHead((6,), 3, dim=4).double().eval()
    for module in head.modules():
        if isinstance(module, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)):
            torch.nn.init.normal_(module.running_mean)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.constant_(module.bias, 2)  # ReLU passes most values, so that queries and keys differ
    features = torch.randn(1, 6, 3, 5, dtype=torch.float64)

    def block(module, pixels):  # ConvBlock of Eq. 9, 10, 13
        norm = module.norm
        mean, deviation = norm.running_mean, (norm.running_var + norm.eps).sqrt()
        return ((pixels @ module.conv.weight.flatten(1).T - mean) / deviation * norm.weight + norm.bias).relu()

    def token_block(module, tokens):  # LinearBlock of Eq. 12
        norm = module.norm.bn
        mean, deviation = norm.running_mean, (norm.running_var + norm.eps).sqrt()
        return ((module.fc(tokens) - mean) / deviation * norm.weight + norm.bias).relu()

    pixels = block(head.levels[0], features[0].flatten(1).T)  # (15, 4)
    scores = head.tokenizer.clustering.to_score
    raw = block(head.tokenizer.clustering.mix, pixels) @ scores.weight.T + scores.bias  # (15, 3)
    clusters = raw.softmax(0).T @ pixels  # Eq. 11
    attention = (block(head.to_query, pixels) @ token_block(head.to_key, clusters).T).softmax(1)
    mixed = block(head.mix, attention @ token_block(head.to_value, clusters))  # Eq. 13
    fc = head.classifier.fc
    expected = mixed @ fc.weight.flatten(1).T + fc.bias  # Eq. 14
    with torch.no_grad():
        logits, auxiliary = head([features])
    torch.testing.assert_close(logits[0].flatten(1).T, expected)
    torch.testing.assert_close(auxiliary[0].flatten(1).T, raw)


@pytest.mark.shows("PACA-47")
def test_levels_are_upsampled_to_the_finest_and_concatenated():
    torch.manual_seed(0)
    head = PaCaHead((6, 8), 3, dim=4).double().eval()
    fine, coarse = torch.randn(1, 6, 4, 6).double(), torch.randn(1, 8, 2, 3).double()
    inputs = []
    head.tokenizer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        head([fine, coarse])
        upsampled = torch.nn.functional.interpolate(head.levels[1](coarse), (4, 6), mode="bilinear")
        torch.testing.assert_close(inputs[0], torch.cat([head.levels[0](fine), upsampled], 1))


@pytest.mark.shows("PACA-52")
def test_defaults_are_256_channels_and_dropout_0_1():
    head = PaCaHead(CHANNELS, 150)
    assert head.mix.conv.weight.shape == (256, 256, 1, 1)
    assert head.classifier.drop.p == 0.1


@pytest.mark.shows("PACA-48")
def test_clusters_of_the_head_are_the_classes():
    model = saccade.create_segmenter("paca_nano", "paca", num_classes=7).eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(2, 3, 64, 96))
    trace = traces[-1]
    assert trace.name == "head.tokenizer"
    assert trace.maps().shape == (2, 7, 16, 24)
    torch.testing.assert_close(trace.maps().sum((2, 3)), torch.ones(2, 7))
    assert {t.name.split(".")[0] for t in traces[:-1]} == {"backbone"}
