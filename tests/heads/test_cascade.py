"""Cascade Mask R-CNN: refinement, losses and averaging over stages."""

import pytest
import torch
from torchvision.ops import box_iou

from saccade.heads.cascade import (
    BOX_WEIGHTS,
    IOU_THRESHOLDS,
    LOSS_WEIGHTS,
    CascadeHeads,
    giou_box_loss,
    refine_proposals,
)
from tests.heads.small_detectors import LARGE, SMALL, make_detector, make_target, random_images


def test_stages_have_rising_thresholds_and_box_weights():
    stages = make_detector("cascade_mask_rcnn").roi_heads.stages
    assert tuple(stage.proposal_matcher.high_threshold for stage in stages) == IOU_THRESHOLDS == (0.5, 0.6, 0.7)
    assert tuple(stage.box_coder.weights for stage in stages) == BOX_WEIGHTS
    assert BOX_WEIGHTS[1:] == ((20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
    assert LOSS_WEIGHTS == (1.0, 0.5, 0.25)


def test_cascade_of_one_stage_equals_mask_rcnn():
    plain = make_detector()
    cascade = make_detector()
    cascade.roi_heads = CascadeHeads([cascade.roi_heads], [1.0], box_loss="smooth_l1")
    targets = [make_target([[4, 4, 40, 40], [20, 10, 60, 44]], [2, 1], SMALL)]
    losses = []
    for model in (plain, cascade):
        torch.manual_seed(0)
        losses.append(model.train()(random_images(SMALL), targets))
    assert len(losses[1]) == 5
    for name, loss in losses[0].items():
        torch.testing.assert_close(losses[1][name if "rpn" in name or "objectness" in name else f"{name}_0"], loss)
    with torch.no_grad():
        for ours, theirs in zip(cascade.eval()(random_images(LARGE)), plain.eval()(random_images(LARGE)), strict=True):
            assert ours.keys() == theirs.keys()
            for key in theirs:
                torch.testing.assert_close(ours[key], theirs[key])


def test_loss_weights_scale_every_loss_of_their_stage():
    losses = []
    for weights in ((1.0, 1.0, 1.0), (1.0, 0.5, 0.25)):
        model = make_detector("cascade_mask_rcnn", loss_weights=weights).train()
        torch.manual_seed(0)
        losses.append(model(random_images(SMALL), [make_target([[4, 4, 40, 40]], [2], SMALL)]))
    for stage, weight in enumerate((1.0, 0.5, 0.25)):
        for name in ("loss_classifier", "loss_box_reg", "loss_mask"):
            torch.testing.assert_close(losses[1][f"{name}_{stage}"], weight * losses[0][f"{name}_{stage}"])


def test_scores_and_masks_are_averaged_over_stages():
    """Stages with constant scores and masks: the prediction is their mean."""
    model = make_detector("cascade_mask_rcnn", num_classes=1).eval()
    scores = [0.2, 0.5, 0.8]  # probability of the only class
    mask_values = [0.1, 0.4, 1.0]  # of every mask pixel
    for stage, score, value in zip(model.roi_heads.stages, scores, mask_values, strict=True):
        for layer in (
            stage.box_predictor.cls_score,
            stage.box_predictor.bbox_pred,
            stage.mask_predictor.mask_fcn_logits,
        ):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        stage.box_predictor.cls_score.bias.data = torch.tensor([1 - score, score]).log()
        stage.mask_predictor.mask_fcn_logits.bias.data.fill_(torch.tensor(value).logit(1e-6))
    with torch.no_grad():
        (prediction,) = model(random_images(SMALL))
    torch.testing.assert_close(prediction["scores"], torch.full_like(prediction["scores"], 0.5))
    inside = prediction["masks"].flatten(1).amax(1)
    torch.testing.assert_close(inside, torch.full_like(inside, 0.5), atol=1e-4, rtol=0)


def test_boxes_are_refined_by_every_stage():
    """Every stage shifts boxes to the right by a quarter of their width: three times in all."""
    model = make_detector("cascade_mask_rcnn", num_classes=1, masks=False).eval()
    for stage in model.roi_heads.stages:
        for layer in (stage.box_predictor.cls_score, stage.box_predictor.bbox_pred):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        stage.box_predictor.bbox_pred.bias.data[4] = 0.25 * stage.box_coder.weights[0]
    features = model.backbone(torch.rand(1, 3, 64, 64))
    with torch.no_grad():
        detections, losses = model.roi_heads(features, [torch.tensor([[4.0, 8, 24, 40]])], [(64, 64)])
    assert losses == {}
    torch.testing.assert_close(detections[0]["boxes"], torch.tensor([[19.0, 8, 39, 40]]))


def test_refine_proposals_uses_the_deltas_of_one_class_and_clips():
    stage = make_detector(num_classes=2).roi_heads
    proposals = [torch.tensor([[10.0, 10, 30, 30], [0, 0, 20, 20]])]
    scores = torch.tensor([[9.0, 1, 2], [0, 3, 1]])  # background first; best objects: class 2, class 1
    deltas = torch.zeros(2, 3, 4)
    deltas[0, 2] = torch.tensor([5.0, 0, 0, 0])  # 5 / 10 of 20 px to the right
    deltas[1, 1] = torch.tensor([-10.0, 0, 0, 0])  # out of the image by its own width
    (refined,) = refine_proposals(stage, scores, deltas.flatten(1), proposals, [(40, 40)])
    torch.testing.assert_close(refined, torch.tensor([[20.0, 10, 40, 30], [0, 0, 0, 20]]))
    (labelled,) = refine_proposals(stage, scores, deltas.flatten(1), proposals, [(40, 40)], [torch.tensor([1, 0])])
    torch.testing.assert_close(labelled[0], proposals[0][0])  # the deltas of its label, class 1, are zero
    torch.testing.assert_close(labelled[1], refined[1])  # background: the best object class


def test_giou_box_loss_of_disjoint_boxes():
    """Shifted by its own width: IoU 0 and no empty hull, so GIoU 0 and loss 10 (1 - 0) / samples."""
    stage = make_detector(num_classes=1).roi_heads
    proposals = [torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10]])]
    target_deltas = [torch.zeros(2, 4)]
    deltas = torch.zeros(2, 2, 4)
    deltas[0, 1, 0] = 10.0  # one width
    loss = giou_box_loss(stage, deltas.flatten(1), proposals, [torch.tensor([1, 0])], target_deltas)
    torch.testing.assert_close(loss, torch.tensor(5.0))  # one positive of two samples


@pytest.mark.parametrize(("box_loss", "equal"), [("smooth_l1", False), ("giou", True)])
def test_box_loss_selects_giou(box_loss, equal):
    model = make_detector("cascade_mask_rcnn", box_loss=box_loss).train()
    torch.manual_seed(0)
    chosen = model(random_images(SMALL), [make_target([[4, 4, 40, 40]], [2], SMALL)])
    default = make_detector("cascade_mask_rcnn").train()
    torch.manual_seed(0)
    expected = default(random_images(SMALL), [make_target([[4, 4, 40, 40]], [2], SMALL)])
    assert bool(chosen["loss_box_reg_0"] == expected["loss_box_reg_0"]) == equal


def test_later_stages_get_refined_proposals_without_ground_truth(monkeypatch):
    """select_training_samples adds ground-truth boxes itself: a stage must not pass its own on."""
    model = make_detector("cascade_mask_rcnn").train()
    given = []
    for stage in model.roi_heads.stages:
        torch.nn.init.zeros_(stage.box_predictor.bbox_pred.weight)  # refinement leaves boxes where they are
        torch.nn.init.zeros_(stage.box_predictor.bbox_pred.bias)
        select = stage.select_training_samples

        def spy(proposals, targets, select=select):
            given.append((proposals[0].clone(), targets[0]["boxes"]))
            return select(proposals, targets)

        monkeypatch.setattr(stage, "select_training_samples", spy)
    model(random_images(SMALL), [make_target([[4.0, 4, 40, 40]], [2], SMALL)])
    assert [len(proposals) for proposals, _ in given] == [30, 15, 15]  # 16 samples, less the ground truth
    assert all((box_iou(proposals, truth) < 0.999).all() for proposals, truth in given)
