"""Checkpoints of segmenters: authors' files in mmsegmentation's layout, our own, and classifiers."""

from functools import cache

import pytest
import torch

import saccade
from saccade.tasks.segmentation import SEGMENTATION_HEADS
from saccade.weights.read import CheckpointError
from tests.parity import kit
from tests.parity.fill import fill
from tests.tasks.test_segmentation import SMALL, make


@cache
def official_file():
    """PaCa-Tiny with its head, as mmengine saves it: `backbone.*`, `decode_head.*`, under `state_dict`."""
    backbone = {k: v for k, v in fill(kit.keys("pacavit_tiny_p2cconv_100_0")).items() if not k.startswith("head.")}
    parts = {f"backbone.{k}": v for k, v in backbone.items()}
    parts |= {f"decode_head.{k}": v for k, v in fill(kit.keys("paca_head")).items()}
    return {"meta": {}, "state_dict": parts}


def test_authors_file_fills_backbone_and_head():
    """Outputs are compared in the parity tests of backbone and head; here, keys."""
    file = official_file()
    model = saccade.create_segmenter("paca_tiny", "paca", 150, backbone_kwargs={"clusters": (100, 100, 100, 0)})
    report = saccade.load_checkpoint(model, file)
    assert report.source == "paca (official)"
    assert report.new == {}
    assert report.ignored == ()
    assert report.loaded == len(model.state_dict())
    backbone = saccade.create_model("paca_tiny", features_only=True)
    saccade.load_checkpoint(backbone, file)  # the backbone alone, from the same file
    torch.testing.assert_close(dict(model.backbone.state_dict()), dict(backbone.state_dict()))
    score = file["state_dict"]["decode_head.clustering.1.weight"]
    torch.testing.assert_close(model.head.tokenizer.clustering.to_score.weight.data, score.flatten(1))


def test_another_number_of_clusters_leaves_their_scores_new():
    model = saccade.create_segmenter("paca_tiny", "paca", 150)  # 200 clusters, as the paper has it
    report = saccade.load_checkpoint(model, official_file())
    assert len(report.new) == 3
    assert set(report.new.values()) == {"200 clusters here, 100 in the checkpoint"}
    assert all(name.endswith("blocks.0.tokenizer.clustering.to_score.weight") for name in report.new)


def mmseg_upernet(model):
    """Our UperNet's state dict under mmsegmentation's names."""
    rules = [
        ("head.pooling.levels.0", "decode_head.psp_modules.0.1"),
        ("head.pooling.levels.1", "decode_head.psp_modules.1.1"),
        ("head.pooling.levels.2", "decode_head.psp_modules.2.1"),
        ("head.pooling.levels.3", "decode_head.psp_modules.3.1"),
        ("head.pooling.fuse", "decode_head.bottleneck"),
        ("head.lateral", "decode_head.lateral_convs"),
        ("head.smooth", "decode_head.fpn_convs"),
        ("head.fuse", "decode_head.fpn_bottleneck"),
        ("head.auxiliary.conv.", "auxiliary_head.convs.0."),
        ("head.auxiliary.classifier.fc", "auxiliary_head.conv_seg"),
        ("head.classifier.fc", "decode_head.conv_seg"),
        ("backbone.model.", "backbone."),
    ]
    return renamed(model, rules)


def mmseg_fpn(model):
    steps = [
        (f"head.branch.levels.{i}.{j}", f"decode_head.scale_heads.{i}.{2 * j}") for i in range(4) for j in range(3)
    ]
    levels = [
        (f"head.neck.fpn.{ours}.{i}.0", f"neck.{theirs}.{i}.conv")
        for ours, theirs in (("inner_blocks", "lateral_convs"), ("layer_blocks", "fpn_convs"))
        for i in range(4)
    ]
    return renamed(
        model, [*steps, *levels, ("head.classifier.fc", "decode_head.conv_seg"), ("backbone.model.", "backbone.")]
    )


def renamed(model, rules):
    theirs = {}
    for key, value in model.state_dict().items():
        for ours, official in rules:
            if key.startswith(ours):
                key = official + key[len(ours) :]
                break
        theirs[key.replace(".norm.", ".bn.") if not key.startswith("backbone.") else key] = value
    return theirs


@pytest.mark.parametrize(("head", "official"), [("upernet", mmseg_upernet), ("fpn", mmseg_fpn)])
def test_mmsegmentation_names_are_converted(head, official):
    """UperNet and semantic FPN on a backbone that needs no conversion."""
    model, other = make("resnet10t", head), make("resnet10t", head)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs = official(model)
    assert not any(key.startswith("head.") for key in theirs)
    report = saccade.load_checkpoint(other, {"state_dict": theirs})
    assert report.loaded == len(model.state_dict())
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))


def test_missing_auxiliary_head_is_reported_as_ignored():
    model = make("resnet10t", "upernet")
    without = saccade.create_segmenter("resnet10t", "upernet", 5, head_kwargs=SMALL["upernet"] | {"auxiliary_dim": 0})
    report = saccade.load_checkpoint(without, mmseg_upernet(model))
    assert set(report.ignored) == {key for key in model.state_dict() if key.startswith("head.auxiliary.")}


@pytest.mark.parametrize("head", SEGMENTATION_HEADS)
def test_saved_checkpoint_round_trip(tmp_path, head):
    name = "sparseformer_nano" if head == "sparse" else "svit_nano"
    model = make(name, head)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    saccade.save_checkpoint(model, tmp_path / "model.safetensors")
    other = make(name, head)
    report = saccade.load_checkpoint(other, tmp_path / "model.safetensors")
    assert (report.source, report.new, report.ignored) == ("saccade", {}, ())
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(("backbone", "head"), [("svit_nano", "fpn"), ("sparseformer_nano", "sparse")])
def test_classifier_checkpoint_loads_into_the_backbone(backbone, head):
    classifier, model = saccade.create_model(backbone, num_classes=7), make(backbone, head)
    with pytest.raises(CheckpointError, match=r"load_checkpoint\(model\.backbone, \.\.\.\)"):
        saccade.load_checkpoint(model, classifier.state_dict())
    report = saccade.load_checkpoint(model.backbone, classifier.state_dict())
    assert any(key.startswith("head.fc") for key in report.ignored)
    first = next(iter(model.backbone.model.state_dict()))
    torch.testing.assert_close(model.backbone.model.state_dict()[first], classifier.state_dict()[first])


def test_checkpoint_of_other_classes_is_refused_and_changes_nothing():
    model, other = make("svit_nano", "fpn"), make("svit_nano", "fpn", 9)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="the checkpoint has 9 classes, the model 5"):
        saccade.load_checkpoint(model, other.state_dict())
    torch.testing.assert_close(dict(model.state_dict()), before)


@pytest.mark.parametrize("head", ["paca", "upernet"])
def test_checkpoint_of_other_classes_fills_all_but_class_layers(head):
    other = make("svit_nano", head, 9)
    model = saccade.create_segmenter("svit_nano", head, 5, head_kwargs=SMALL[head], checkpoint=other.state_dict())
    theirs, new = other.state_dict(), 0
    for key, value in model.state_dict().items():
        if value.shape == theirs[key].shape:
            torch.testing.assert_close(value, theirs[key])
        else:
            new += 1
            assert (value.shape[0], theirs[key].shape[0]) == (5, 9)
    assert new == 4  # weights and biases of the classifier, and of the clusters or the auxiliary classifier


def test_classifier_checkpoint_fills_the_backbone():
    classifier = saccade.create_model("paca_nano", num_classes=7)
    model = saccade.create_segmenter(
        "paca_nano", "paca", 5, head_kwargs=SMALL["paca"], checkpoint=classifier.state_dict()
    )
    theirs = classifier.state_dict()
    for key, value in model.backbone.model.state_dict().items():
        torch.testing.assert_close(value, theirs[key])
