"""Mask R-CNN and, where the protocol is the same, its cascade."""

import pytest
import torch
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

from saccade.heads.mask_rcnn import promote_to_float32, proposal_network, region_stage
from tests.heads.small_detectors import (
    BUILDERS,
    FEW_PROPOSALS,
    LARGE,
    SMALL,
    crowd,
    make_detector,
    make_target,
    random_images,
    zero_gradients,
)

HEADS = sorted(BUILDERS)


@pytest.mark.parametrize("head", HEADS)
def test_losses_reach_every_parameter_with_zero_one_and_100_objects(head):
    model = make_detector(head).train()
    targets = [
        make_target([[4, 4, 40, 40]], [2], SMALL),
        make_target([], [], LARGE),
        make_target(crowd(), [1, 3] * 50, LARGE),
    ]
    losses = model(random_images(SMALL, LARGE, LARGE), targets)
    names = ("loss_classifier", "loss_box_reg", "loss_mask")
    per_stage = {f"{name}_{i}" for name in names for i in range(3)} if head == "cascade_mask_rcnn" else set(names)
    assert set(losses) == {"loss_objectness", "loss_rpn_box_reg"} | per_stage
    assert all(loss.isfinite() and loss >= 0 for loss in losses.values())
    assert zero_gradients(model, losses) == []


@pytest.mark.parametrize("head", HEADS)
def test_batch_without_objects_has_zero_box_and_mask_losses(head):
    model = make_detector(head).train()
    losses = model(random_images(SMALL, SMALL), [make_target([], [], SMALL)] * 2)
    assert all(loss.isfinite() for loss in losses.values())
    assert all(loss == 0 for name, loss in losses.items() if "mask" in name or "box_reg" in name)
    torch.stack(list(losses.values())).sum().backward()


@pytest.mark.parametrize("head", HEADS)
def test_predictions_are_inside_their_image_and_sorted(head):
    model = make_detector(head).eval()
    with torch.no_grad():
        predictions = model(random_images(SMALL, LARGE))
    for prediction, (height, width) in zip(predictions, (SMALL, LARGE), strict=True):
        boxes, count = prediction["boxes"], len(prediction["boxes"])
        assert count == 30 * 3  # every proposal for every class: no two of these overlap enough for NMS
        assert prediction["masks"].shape == (count, 1, height, width)
        assert prediction["labels"].dtype == torch.int64
        assert set(prediction["labels"].tolist()) <= {1, 2, 3}
        assert (prediction["scores"].diff() <= 0).all()
        assert boxes[:, 0::2].min() >= 0
        assert boxes[:, 0::2].max() <= width
        assert boxes[:, 1::2].min() >= 0
        assert boxes[:, 1::2].max() <= height
        assert prediction["masks"].min() >= 0
        assert prediction["masks"].max() <= 1


@pytest.mark.parametrize("head", HEADS)
def test_high_threshold_gives_empty_prediction(head):
    model = make_detector(head, box_score_thresh=0.999).eval()
    with torch.no_grad():
        (prediction,) = model(random_images(SMALL))
    assert prediction["boxes"].shape == (0, 4)
    assert prediction["labels"].shape == prediction["scores"].shape == (0,)
    assert prediction["masks"].shape == (0, 1, *SMALL)


@pytest.mark.parametrize("head", HEADS)
def test_masks_false_removes_the_mask_head(head):
    model = make_detector(head, masks=False)
    assert not any("mask" in name for name, _ in model.named_parameters())
    target = make_target([[4, 4, 40, 40]], [2], SMALL)
    del target["masks"]
    losses = model(random_images(SMALL), [target])
    assert not any("mask" in name for name in losses)
    with torch.no_grad():
        assert "masks" not in model.eval()(random_images(SMALL))[0]


def test_mask_rcnn_equals_torchvision():
    """Same submodule names: our weights load into torchvision's model and give the same detections and losses."""
    ours = make_detector(box_detections_per_img=20)
    anchors = AnchorGenerator(tuple((size,) for size in (8, 16, 32, 64, 128)), ((0.5, 1.0, 2.0),) * 5)
    parts = dict(box_head=None, mask_head=ours.roi_heads.mask_head, mask_predictor=ours.roi_heads.mask_predictor)
    parts |= dict(box_predictor=ours.roi_heads.box_predictor, rpn_anchor_generator=anchors)
    settings = dict(box_batch_size_per_image=16, box_score_thresh=0.0, box_detections_per_img=20, **FEW_PROPOSALS)
    theirs = MaskRCNN(
        make_detector(seed=1).backbone, min_size=64, max_size=128, image_mean=[0.5] * 3, image_std=[0.25] * 3,
        **parts, **settings,
    )  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    images = random_images(SMALL, LARGE)
    with torch.no_grad():
        for our_prediction, their_prediction in zip(ours.eval()(images), theirs.eval()(images), strict=True):
            for key in ("boxes", "labels", "scores", "masks"):
                torch.testing.assert_close(our_prediction[key], their_prediction[key])
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(0)  # both sample proposals
        losses.append(model.train()(random_images(SMALL), [make_target([[4, 4, 40, 40]], [2], SMALL)]))
    assert losses[0].keys() == losses[1].keys()
    for name in losses[0]:
        torch.testing.assert_close(losses[0][name], losses[1][name])


def test_box_head_is_two_linear_layers_or_four_convolutions():
    plain = region_stage(16, 3, masks=True, box_head="mlp", box_norm=None, mask_norm=None)
    conv = region_stage(16, 3, masks=True, box_head="conv", box_norm=torch.nn.BatchNorm2d, mask_norm=None)

    def layers(module, kind):
        return [m for m in module.modules() if isinstance(m, kind)]

    assert [(m.in_features, m.out_features) for m in layers(plain.box_head, torch.nn.Linear)] == [
        (16 * 49, 1024),
        (1024, 1024),
    ]
    assert [m.kernel_size for m in layers(conv.box_head, torch.nn.Conv2d)] == [(3, 3)] * 4
    assert len(layers(conv.box_head, torch.nn.BatchNorm2d)) == 4
    assert layers(conv.mask_head, torch.nn.BatchNorm2d) == []
    assert (plain.box_roi_pool.output_size, plain.mask_roi_pool.output_size) == ((7, 7), (14, 14))
    assert plain.box_predictor.cls_score.out_features == 4  # three classes and the background


def test_proposal_network_defaults_are_the_papers():
    rpn = proposal_network(16)
    assert rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    assert rpn.anchor_generator.aspect_ratios == ((0.5, 1.0, 2.0),) * 5
    assert rpn.head.cls_logits.out_channels == 3
    assert (rpn._pre_nms_top_n, rpn._post_nms_top_n) == (
        {"training": 2000, "testing": 1000},
        {"training": 1000, "testing": 1000},
    )


def test_autocast_keeps_anchors_boxes_and_scores_in_float32():
    """torchvision would create anchors and boxes in bfloat16, whose steps at 1000 px are 4 px."""
    model = make_detector(size=800).eval()
    anchors = []
    model.rpn.anchor_generator.register_forward_hook(lambda _, __, out: anchors.append(out[0]))
    (image,) = random_images((8, 12))
    with torch.no_grad():
        exact = model([image])[0]
        with torch.autocast("cpu", torch.bfloat16):
            cast = model([image])[0]
    assert anchors[1].dtype == cast["boxes"].dtype == cast["scores"].dtype == torch.float32
    torch.testing.assert_close(anchors[1], anchors[0], rtol=0, atol=0)
    assert exact["boxes"].dtype == torch.float32


def test_promote_to_float32_keeps_float64():
    dtypes = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
    assert {dtype: promote_to_float32(torch.ones(1, dtype=dtype)).dtype for dtype in dtypes} == dtypes


def test_training_without_targets_is_refused():
    with pytest.raises(ValueError, match=r"expected one target per image \(1\), got none"):
        make_detector().train()(random_images(SMALL))
