"""Segmenters: every head on every family, losses, metrics."""

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.tasks.segmentation import (
    BACKBONE_KWARGS,
    SEGMENTATION_HEADS,
    SegmentationScores,
    pixel_loss,
    segmentation_metric,
)
from tests.heads.small_detectors import fill_zero_parameters, zero_gradients
from tests.weights.folder import SHIPPED, weights_in

SMALL = {  # head options for tests
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


@pytest.mark.shows("X-03")
def test_every_head_and_family_is_paired():
    assert set(SMALL) == set(SEGMENTATION_HEADS)
    assert len(PAIRS) == 17


@pytest.mark.parametrize(("backbone", "head"), PAIRS)
def test_logits_have_the_input_size_and_losses_reach_every_parameter(backbone, head):
    model = fill_zero_parameters(make(backbone, head))
    images, masks = torch.randn(2, 3, 50, 75), torch.randint(5, (2, 50, 75))
    losses = model.loss(images, masks)
    assert ("auxiliary" in losses) == (head in ("paca", "upernet"))
    assert zero_gradients(model, losses) == []
    model.eval()
    with torch.no_grad():
        batched = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    assert batched.shape == (2, 5, 50, 75)
    torch.testing.assert_close(batched, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backbone", ["resnet10t", "test_vit", "test_convnext"])
def test_timm_backbones_are_accepted(backbone):
    """Feature pyramids with and without stride 2 between levels."""
    options = {"dynamic_img_size": True} if "vit" in backbone else {}
    model = make(backbone, "vt_fpn" if "resnet" in backbone else "fpn", backbone_kwargs=options).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5, 96, 64)


@pytest.mark.parametrize("head", ["vt_fpn", "paca", "upernet", "sparse"])
def test_segmenter_fits_two_colours(head):
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


@pytest.mark.shows("SF-74")
def test_more_tokens_of_the_sparse_head_start_uniformly_over_the_image():
    """As in detection: regions of half the image, centres uniform on [0, 1]. The classifier's number keeps its grid."""
    torch.manual_seed(0)
    more = saccade.create_segmenter("sparseformer_tiny", "sparse", 3, backbone_kwargs={"num_tokens": 400})
    regions = more.backbone.model.regions
    centre, size = (regions[:, :2] + regions[:, 2:]) / 2, regions[:, 2:] - regions[:, :2]
    torch.testing.assert_close(size, torch.full_like(size, 0.5))
    for axis in range(2):
        counts = torch.histc(centre[:, axis].detach(), 4, 0, 1)
        assert counts.sum() == 400
        assert counts.min() > 60
    classifier = saccade.create_model("sparseformer_tiny")
    same = saccade.create_segmenter("sparseformer_tiny", "sparse", 3)
    torch.testing.assert_close(same.backbone.model.regions, classifier.regions)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="head must be one of vt_fpn, fpn, paca, upernet, sparse"):
        saccade.create_segmenter("svit_nano", "unet")
    with pytest.raises(ValueError, match=r"expected a sparseformer_\* backbone for the sparse head, got svit_nano"):
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
def test_autocast_matches_float32(backbone, head):
    model, images = make(backbone, head).eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(images)
    assert (exact - cast.float()).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(("backbone", "head"), [("paca_nano", "paca"), ("sparseformer_nano", "sparse")])
def test_exported_model_matches_eager(backbone, head):
    model, images = make(backbone, head).eval(), torch.randn(1, 3, 64, 96)
    exported = torch.export.export(model, (images,)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "head"), PAIRS)
def test_compiled_model_matches_eager(backbone, head):
    model, images = make(backbone, head).eval(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_traces_of_backbone_and_head_are_reported():
    model = make("svit_nano", "vt_fpn").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, 64, 96))
    names = [trace.name for trace in traces]
    assert names[-4:] == [f"head.neck.layers.0.tokenizers.{level}" for level in range(4)]
    assert names[0] == "backbone.model.stages.0.blocks.0"
    assert [tuple(trace.maps().shape) for trace in traces[-4:]] == [(1, 4, 16 // 2**i, 24 // 2**i) for i in range(4)]


def test_every_layer_of_vt_fpn_is_reported():
    torch.manual_seed(0)
    model = saccade.create_segmenter("svit_nano", "vt_fpn", 5, head_kwargs=SMALL["vt_fpn"] | {"layers": 2}).eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.randn(1, 3, 64, 64))
    assert [trace.name.rpartition(".")[0] for trace in traces[-8:]] == (
        ["head.neck.layers.0.tokenizers"] * 4 + ["head.neck.layers.1.tokenizers"] * 4
    )


@pytest.mark.shows("PACA-51")
def test_loss_is_cross_entropy_over_labelled_pixels_at_mask_size():
    logits, masks = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 8, 10))
    masks[:, :3] = 255
    large = F.interpolate(logits, (8, 10), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(large.movedim(1, -1)[:, 3:].reshape(-1, 3), masks[:, 3:].flatten())
    torch.testing.assert_close(pixel_loss(logits, masks), expected)


def test_batch_without_labels_has_zero_loss_and_gradient():
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    loss = pixel_loss(logits, torch.full((1, 4, 4), 255))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.abs().max() == 0


@pytest.mark.shows("PACA-51", "PACA-54")
def test_auxiliary_loss_has_weight_0_4():
    for head in ("paca", "upernet"):
        model = make("svit_nano", head).eval()
        model.head.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout2d):
                module.eval()
        images, masks = torch.randn(2, 3, 32, 32), torch.randint(5, (2, 32, 32))
        with torch.no_grad():
            weighted = model.loss(images, masks)
            model.auxiliary_weight = 1.0
            unweighted = model.loss(images, masks)
        torch.testing.assert_close(weighted["auxiliary"], 0.4 * unweighted["auxiliary"], rtol=1e-4, atol=1e-5)


@pytest.mark.shows("VT-73", "SF-75", "X-05")
def test_scores_match_a_confusion_matrix_by_hand():
    """Class 2 is never labelled, class 3 neither labelled nor predicted."""
    truth = torch.tensor([[[0, 0, 0, 0], [1, 1, 255, 1]]])
    predicted = torch.tensor([[[0, 0, 0, 2], [0, 0, 1, 0]]])
    metric = segmentation_metric(4)
    metric.update(predicted[:, :1], truth[:, :1])
    metric.update(predicted[:, 1:], truth[:, 1:])  # accumulated, not averaged over images
    scores = SegmentationScores.from_confusion(metric.compute())
    assert metric.compute().sum() == 7
    assert scores.iou == [3 / 7, 0.0, 0.0, None]
    assert scores.acc == [0.75, 0.0, None, None]
    assert scores.miou == pytest.approx((3 / 7) / 3)
    assert scores.macc == pytest.approx(0.75 / 2)
    assert scores.aacc == pytest.approx(3 / 7)


def test_perfect_prediction_scores_one():
    masks = torch.randint(5, (2, 16, 16))
    metric = segmentation_metric(5)
    metric.update(masks, masks)
    scores = SegmentationScores.from_confusion(metric.compute())
    assert (scores.miou, scores.macc, scores.aacc) == (1, 1, 1)


@pytest.mark.shows("PACA-53")
def test_paca_backbones_have_200_clusters():
    stages = {name: options["clusters"] for name, options in BACKBONE_KWARGS.items()}
    assert stages == {
        **dict.fromkeys(("paca_tiny", "paca_small", "paca_base", "paca_mlp_small"), (200, 200, 200, 0)),
        **dict.fromkeys(("paca_ec_tiny", "paca_ec_small", "paca_ec_base"), (200, 200, 200, 200)),
    }
    with torch.device("meta"):
        model = saccade.create_segmenter("paca_tiny", "paca")
        ablation = saccade.create_segmenter("paca_tiny", "paca", backbone_kwargs={"clusters": (49, 49, 49, 0)})
    for built, expected in ((model, {200}), (ablation, {49})):
        weights = {key: value for key, value in built.backbone.state_dict().items() if "to_score.weight" in key}
        assert {len(value) for value in weights.values()} == expected
    assert model.num_classes == 150


def test_unknown_pretrained_segmenter_is_named():
    message = r"no weights paca_nano\+fpn\.camvid exist; of paca_nano: paca_nano\+paca\.camvid\."
    with weights_in(SHIPPED), pytest.raises(ValueError, match=message):
        saccade.create_segmenter("paca_nano", "fpn", pretrained="camvid")
