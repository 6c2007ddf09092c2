"""Segmenters: every head on every kind of backbone, their losses, and what their answers are worth."""

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.tasks.segmentation import SEGMENTATION_HEADS, SegmentationScores, pixel_loss, segmentation_metric

SMALL = {  # heads in a size for tests
    "vt_fpn": {"dim": 32, "branch_dim": 16, "token_dim": 64, "num_tokens": 4, "num_heads": 4},
    "fpn": {"dim": 32, "branch_dim": 16},
    "paca": {"dim": 16},
    "upernet": {"dim": 16, "auxiliary_dim": 8},
    "sparse": {"dim": 16},
}
NANOS = ["svit_nano", "paca_nano", "sparseformer_nano", "vt_nano"]
PAIRS = [(backbone, head) for backbone in NANOS for head in SMALL if head != "sparse" or "sparse" in backbone]


def make(backbone, head, classes=5, **kwargs):
    torch.manual_seed(0)
    return saccade.create_segmenter(backbone, head, classes, head_kwargs=SMALL[head], **kwargs)


def test_every_head_is_tested():
    assert set(SMALL) == set(SEGMENTATION_HEADS)
    assert len(PAIRS) == 17


@pytest.mark.parametrize(("backbone", "head"), PAIRS)
def test_any_size_in_the_same_size_out_and_every_parameter_learns(backbone, head):
    model = make(backbone, head)
    images, masks = torch.randn(2, 3, 50, 75), torch.randint(5, (2, 50, 75))
    losses = model.loss(images, masks)
    assert ("auxiliary" in losses) == (head in ("paca", "upernet"))
    sum(losses.values()).backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == []
    model.eval()
    with torch.no_grad():
        both = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    assert both.shape == (2, 5, 50, 75)
    torch.testing.assert_close(both, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backbone", ["resnet10t", "test_vit", "test_convnext"])
def test_backbones_of_timm(backbone):
    """Pyramids with and without strides of 2 between the levels."""
    options = {"dynamic_img_size": True} if "vit" in backbone else {}
    model = make(backbone, "vt_fpn" if "resnet" in backbone else "fpn", backbone_kwargs=options).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5, 96, 64)


@pytest.mark.parametrize("head", ["vt_fpn", "paca", "upernet", "sparse"])
def test_it_learns_where_things_are(head):
    """Two colours, each its class: a few steps must do."""
    torch.manual_seed(0)
    model = make("sparseformer_nano" if head == "sparse" else "svit_nano", head, 2)
    images = torch.zeros(4, 3, 32, 32)
    images[:, :, :16] = 1
    images[1::2] = images[1::2].flip(2)
    masks = (images[:, 0] > 0.5).long()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum(model.loss(images, masks).values())
        loss.backward()
        optimizer.step()
    assert (model.train()(images).argmax(1) == masks).float().mean() > 0.9


def test_wrong_heads_and_inputs_are_named():
    with pytest.raises(ValueError, match="head must be one of vt_fpn, fpn, paca, upernet, sparse"):
        saccade.create_segmenter("svit_nano", "unet")
    with pytest.raises(ValueError, match=r"expected a sparseformer_\* backbone, got svit_nano"):
        saccade.create_segmenter("svit_nano", "sparse")
    with pytest.raises(ValueError, match="Did you mean 'svit_nano'"):
        saccade.create_segmenter("svit_nan", "fpn")
    with pytest.raises(ValueError, match="num_tokens must be one number or 4"):
        saccade.create_segmenter("svit_nano", "vt_fpn", head_kwargs={"num_tokens": (8, 8)})
    model = make("svit_nano", "upernet")
    with pytest.raises(ValueError, match="batch axis"):
        model(torch.randn(3, 64, 64))
    with pytest.raises(ValueError, match=r"expected masks \(B, H, W\) for 2 images"):
        model.loss(torch.randn(2, 3, 64, 64), torch.zeros(2, 1, 64, 64))
    with pytest.raises(ValueError, match="expected a batch of at least 2 in training, got 1"):
        model.loss(torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64))


@pytest.mark.parametrize(("backbone", "head"), [("paca_nano", "paca"), ("svit_nano", "upernet"), ("vt_nano", "vt_fpn")])
def test_autocast_agrees(backbone, head):
    model, images = make(backbone, head).eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            close = model(images)
    assert (exact - close.float()).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(("backbone", "head"), [("paca_nano", "paca"), ("sparseformer_nano", "sparse")])
def test_exported_agrees(backbone, head):
    model, images = make(backbone, head).eval(), torch.randn(1, 3, 64, 96)
    exported = torch.export.export(model, (images,)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "head"), PAIRS)
def test_compiled_agrees(backbone, head):
    model, images = make(backbone, head).eval(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_tokens_of_backbone_and_head_are_recorded():
    model = make("svit_nano", "vt_fpn").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, 64, 96))
    names = [trace.name for trace in traces]
    assert names[-4:] == [f"head.neck.layers.0.tokenizers.{level}" for level in range(4)]
    assert names[0] == "backbone.model.stages.0.blocks.0"
    assert [tuple(trace.maps().shape) for trace in traces[-4:]] == [(1, 4, 16 // 2**i, 24 // 2**i) for i in range(4)]


def test_a_second_layer_of_vt_fpn_asks_with_the_tokens_of_the_first():
    torch.manual_seed(0)
    model = saccade.create_segmenter("svit_nano", "vt_fpn", 5, head_kwargs=SMALL["vt_fpn"] | {"layers": 2}).eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, 64, 64))
    assert [trace.name.rpartition(".")[0] for trace in traces[-8:]] == (
        ["head.neck.layers.0.tokenizers"] * 4 + ["head.neck.layers.1.tokenizers"] * 4
    )


def test_vt_fpn_starts_as_the_levels_themselves():
    """A fresh projector adds nothing: the neck is its 1x1 convolutions (VTR-01), a drop-in for FPN (VT-67)."""
    from saccade.heads.fpn import FPN
    from saccade.heads.vt_fpn import VTPyramid

    pyramid = [torch.randn(2, 16 * 2**i, 16 // 2**i, 24 // 2**i) for i in range(4)]
    channels = [features.shape[1] for features in pyramid]
    neck = VTPyramid(channels, 16, token_dim=32, num_tokens=2, num_heads=4).eval()
    maps = neck(pyramid)
    assert [m.shape for m in maps] == [m.shape for m in FPN(channels, 16)(pyramid)]
    torch.testing.assert_close(maps[0], pyramid[0])  # as wide as the maps that come out


def test_levels_of_vt_fpn_hear_each_other():
    """The coarsest map changes what is put back on the finest, through the tokens alone (VT-65)."""
    from saccade.heads.vt_fpn import VTPyramid

    torch.manual_seed(0)
    neck = VTPyramid([16, 16], 16, token_dim=32, num_tokens=2, num_heads=4).eval()
    for module in neck.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            torch.nn.init.ones_(module.weight)
    fine, coarse = torch.randn(1, 16, 8, 8), torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        before, after = neck([fine, coarse])[0], neck([fine, coarse + 1])[0]
    assert (before - after).abs().max() > 1e-3


# The loss


def test_the_loss_is_cross_entropy_over_labelled_pixels_at_their_size():
    logits, masks = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 8, 10))
    masks[:, :3] = 255
    large = F.interpolate(logits, (8, 10), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(large.movedim(1, -1)[:, 3:].reshape(-1, 3), masks[:, 3:].flatten())
    torch.testing.assert_close(pixel_loss(logits, masks), expected)


def test_a_batch_without_labels_teaches_nothing():
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    loss = pixel_loss(logits, torch.full((1, 4, 4), 255))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.abs().max() == 0


def test_the_auxiliary_loss_counts_0_4():
    for head in ("paca", "upernet"):
        model = make("svit_nano", head).eval()
        model.head.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout2d):
                module.eval()
        images, masks = torch.randn(2, 3, 32, 32), torch.randint(5, (2, 32, 32))
        with torch.no_grad():
            once = model.loss(images, masks)
            model.auxiliary_weight = 1.0
            whole = model.loss(images, masks)
        torch.testing.assert_close(once["auxiliary"], 0.4 * whole["auxiliary"], rtol=1e-4, atol=1e-5)


# The metric


def test_scores_against_a_confusion_matrix_by_hand():
    """VT-73: three classes, one of them never labelled, one never answered."""
    truth = torch.tensor([[[0, 0, 0, 0], [1, 1, 255, 1]]])
    answer = torch.tensor([[[0, 0, 0, 2], [0, 0, 1, 0]]])
    metric = segmentation_metric(4)
    metric.update(answer[:, :1], truth[:, :1])
    metric.update(answer[:, 1:], truth[:, 1:])  # accumulated, not averaged over images
    scores = SegmentationScores.from_confusion(metric.compute())
    assert metric.compute().sum() == 7
    assert scores.iou == [3 / 7, 0.0, 0.0, None]  # class 3: neither labelled nor answered
    assert scores.acc == [0.75, 0.0, None, None]  # class 2: nothing to find
    assert scores.miou == pytest.approx((3 / 7) / 3)
    assert scores.macc == pytest.approx(0.75 / 2)
    assert scores.aacc == pytest.approx(3 / 7)


def test_a_perfect_answer_scores_one():
    masks = torch.randint(5, (2, 16, 16))
    metric = segmentation_metric(5)
    metric.update(masks, masks)
    scores = SegmentationScores.from_confusion(metric.compute())
    assert (scores.miou, scores.macc, scores.aacc) == (1, 1, 1)
