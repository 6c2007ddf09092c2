"""Mask R-CNN and its cascade, in torchvision's protocol."""

import pytest
import torch
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

from saccade.heads.cascade import CascadeHeads, giou_box_loss, refine_proposals
from tests.heads.small import BUILDERS, FEW, WIDTH, check_learning, detector, target

HEADS = sorted(BUILDERS)
SMALL, LARGE = (48, 64), (80, 64)  # height, width


def pictures(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.rand(3, *size, generator=dice) for size in sizes]


@pytest.mark.parametrize("head", HEADS)
def test_one_none_and_a_hundred_objects_of_mixed_sizes_teach_every_parameter(head):
    model = detector(head).train()
    grid = [[6.0 * (i % 10), 6.0 * (i // 10), 6.0 * (i % 10) + 9, 6.0 * (i // 10) + 9] for i in range(100)]
    targets = [target([[4, 4, 40, 40]], [2], SMALL), target([], [], LARGE), target(grid, [1, 3] * 50, LARGE)]
    losses = model(pictures(SMALL, LARGE, LARGE), targets)
    stages = 3 if head == "cascade_mask_rcnn" else 1
    assert len(losses) == 3 * stages + 2
    assert all(loss.isfinite() and loss >= 0 for loss in losses.values())
    check_learning(model, losses)


@pytest.mark.parametrize("head", HEADS)
def test_a_batch_without_any_object_has_losses_and_gradients(head):
    model = detector(head).train()
    losses = model(pictures(SMALL, SMALL), [target([], [], SMALL)] * 2)
    assert all(loss.isfinite() for loss in losses.values())
    assert all(loss == 0 for name, loss in losses.items() if "mask" in name or "box_reg" in name)
    sum(losses.values()).backward()


@pytest.mark.parametrize("head", HEADS)
def test_predictions_lie_in_their_own_picture_best_first(head):
    model = detector(head).eval()
    with torch.no_grad():
        found = model(pictures(SMALL, LARGE))
    for one, (height, width) in zip(found, (SMALL, LARGE), strict=True):
        boxes, count = one["boxes"], len(one["boxes"])
        assert count > 10
        assert one["masks"].shape == (count, 1, height, width)
        assert one["labels"].dtype == torch.int64
        assert set(one["labels"].tolist()) <= {1, 2, 3}
        assert (one["scores"].diff() <= 0).all()
        assert (boxes[:, 0::2] >= 0).all()
        assert (boxes[:, 0::2] <= width).all()
        assert (boxes[:, 1::2] >= 0).all()
        assert (boxes[:, 1::2] <= height).all()
        assert (one["masks"] >= 0).all()
        assert (one["masks"] <= 1).all()


@pytest.mark.parametrize("head", HEADS)
def test_nothing_found_is_an_answer(head):
    model = detector(head, box_score_thresh=0.999).eval()
    with torch.no_grad():
        (found,) = model(pictures(SMALL))
    assert found["boxes"].shape == (0, 4)
    assert found["labels"].shape == found["scores"].shape == (0,)
    assert found["masks"].shape == (0, 1, *SMALL)


@pytest.mark.parametrize("head", HEADS)
def test_without_masks_there_is_no_mask_head(head):
    model = detector(head, masks=False)
    assert not any("mask" in name for name, _ in model.named_parameters())
    losses = model(pictures(SMALL), [{k: v for k, v in target([[4, 4, 40, 40]], [2], SMALL).items() if k != "masks"}])
    assert not any("mask" in name for name in losses)
    with torch.no_grad():
        assert "masks" not in model.eval()(pictures(SMALL))[0]


def test_mask_rcnn_is_torchvisions_own():
    """Same parts, same names, same answers: its weights load and give its detections and losses."""
    ours = detector(box_detections_per_img=20)
    anchors = AnchorGenerator(tuple((size,) for size in (8, 16, 32, 64, 128)), ((0.5, 1.0, 2.0),) * 5)
    parts = dict(box_head=None, mask_head=ours.roi_heads.mask_head, mask_predictor=ours.roi_heads.mask_predictor)
    parts |= dict(box_predictor=ours.roi_heads.box_predictor, rpn_anchor_generator=anchors)
    settings = dict(box_batch_size_per_image=16, box_score_thresh=0.0, box_detections_per_img=20, **FEW)
    theirs = MaskRCNN(
        detector(seed=1).backbone, min_size=64, max_size=128, image_mean=[0.5] * 3, image_std=[0.25] * 3,
        **parts, **settings,
    )  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for mine, other in zip(ours.eval()(pictures(SMALL, LARGE)), theirs.eval()(pictures(SMALL, LARGE)), strict=True):
            for key in ("boxes", "labels", "scores", "masks"):
                torch.testing.assert_close(mine[key], other[key])
    targets = [target([[4, 4, 40, 40]], [2], SMALL)]
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(0)  # both draw proposals
        losses.append(model.train()(pictures(SMALL), targets))
    assert losses[0].keys() == losses[1].keys()
    for name in losses[0]:
        torch.testing.assert_close(losses[0][name], losses[1][name])


def test_a_cascade_of_one_stage_is_mask_rcnn():
    plain = detector()
    cascade = detector()
    cascade.roi_heads = CascadeHeads([cascade.roi_heads], [1.0], box_loss="smooth_l1")
    targets = [target([[4, 4, 40, 40], [20, 10, 60, 44]], [2, 1], SMALL)]
    losses = []
    for model in (plain, cascade):
        torch.manual_seed(0)
        losses.append(model.train()(pictures(SMALL), targets))
    for name, loss in losses[0].items():
        torch.testing.assert_close(losses[1][name if "rpn" in name or "objectness" in name else f"{name}_0"], loss)
    with torch.no_grad():
        for mine, other in zip(cascade.eval()(pictures(LARGE)), plain.eval()(pictures(LARGE)), strict=True):
            for key in other:
                torch.testing.assert_close(mine[key], other[key])


def test_a_cascade_averages_scores_and_masks_and_keeps_the_last_boxes():
    """Stages that say the same of every region: the answer is their mean, whatever the boxes."""
    model = detector("cascade_mask_rcnn", num_classes=1).eval()
    said = [0.2, 0.5, 0.8]  # probability of the only class
    shapes = [0.1, 0.4, 1.0]  # of every pixel of a mask
    for stage, score, shape in zip(model.roi_heads.stages, said, shapes, strict=True):
        for layer in (
            stage.box_predictor.cls_score,
            stage.box_predictor.bbox_pred,
            stage.mask_predictor.mask_fcn_logits,
        ):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        stage.box_predictor.cls_score.bias.data = torch.tensor([1 - score, score]).log()
        stage.mask_predictor.mask_fcn_logits.bias.data.fill_(torch.tensor(shape).logit(1e-6))
    with torch.no_grad():
        (found,) = model(pictures(SMALL))
    torch.testing.assert_close(found["scores"], torch.full_like(found["scores"], 0.5))
    inside = found["masks"].flatten(1).amax(1)
    torch.testing.assert_close(inside, torch.full_like(inside, 0.5), atol=1e-4, rtol=0)


def test_refining_moves_a_box_by_the_shifts_of_its_class_and_keeps_it_inside():
    stage = detector(num_classes=2).roi_heads
    proposals = [torch.tensor([[10.0, 10, 30, 30], [0, 0, 20, 20]])]
    scores = torch.tensor([[9.0, 1, 2], [0, 3, 1]])  # background first; best objects: class 2, class 1
    moves = torch.zeros(2, 3, 4)
    moves[0, 2] = torch.tensor([5.0, 0, 0, 0])  # 5 / 10 of 20 px to the right
    moves[1, 1] = torch.tensor([-10.0, 0, 0, 0])  # out of the picture by its whole width
    (moved,) = refine_proposals(stage, scores, moves.flatten(1), proposals, [(40, 40)])
    torch.testing.assert_close(moved, torch.tensor([[20.0, 10, 40, 30], [0, 0, 0, 20]]))
    (told,) = refine_proposals(stage, scores, moves.flatten(1), proposals, [(40, 40)], [torch.tensor([1, 0])])
    torch.testing.assert_close(told[0], proposals[0][0])  # the true class 1 does not move
    torch.testing.assert_close(told[1], moved[1])  # background: the best object class


def test_giou_loss_of_planted_boxes():
    """A box moved by its whole width: IoU 0, the hull half empty of nothing: GIoU 0, loss 10 (1 - 0) / samples."""
    stage = detector(num_classes=1).roi_heads
    places = [torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10]])]
    true = [torch.zeros(2, 4)]  # the proposals are right
    moves = torch.zeros(2, 2, 4)
    moves[0, 1, 0] = 10.0  # by one width
    loss = giou_box_loss(stage, moves.flatten(1), places, [torch.tensor([1, 0])], true)
    torch.testing.assert_close(loss, torch.tensor(5.0))  # 10 x 1 over two samples; the background does not count


def test_later_stages_get_better_proposals_and_no_true_boxes_twice(monkeypatch):
    """What a stage is given: the boxes of the one before, moved, less the true ones that were added to it."""
    model = detector("cascade_mask_rcnn").train()
    given = []
    for stage in model.roi_heads.stages:
        select = stage.select_training_samples

        def spy(proposals, targets, select=select):
            given.append([boxes.clone() for boxes in proposals])
            return select(proposals, targets)

        monkeypatch.setattr(stage, "select_training_samples", spy)
    true = target([[4.0, 4, 40, 40]], [2], SMALL)
    model(pictures(SMALL), [true])
    assert len(given) == 3
    scaled = true["boxes"] * 64 / 48  # the detector resizes to 64 px
    for stage in given[1:]:
        assert len(stage[0]) < len(given[0][0])  # sampled
        assert (box_iou(stage[0], scaled) < 0.999).all()


def test_under_autocast_places_stay_exact():
    """torchvision would make anchors and boxes in bfloat16, whose steps at 1000 px are 4 px."""
    model = detector(size=800).eval()
    seen = []
    model.rpn.anchor_generator.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    (image,) = pictures((8, 12))
    with torch.no_grad():
        straight = model([image])[0]
        with torch.autocast("cpu", torch.bfloat16):
            cast = model([image])[0]
    assert seen[1].dtype == cast["boxes"].dtype == cast["scores"].dtype == torch.float32
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
    assert straight["boxes"].dtype == torch.float32


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (None, "expected one target per image \\(1\\), got none"),
        ([{"boxes": torch.zeros(0, 4)}], "has no labels, masks"),
        ([{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long()}], "masks=False"),
        ([target([[0, 0, 9, 9]], [4], SMALL)], "from 1 to 3"),
        ([target([[0, 0, 9, 9]], [0], SMALL)], "0 is the background"),
        (
            [{"boxes": torch.zeros(4), "labels": torch.zeros(1).long(), "masks": torch.zeros(1, *SMALL)}],
            "boxes \\(n, 4\\)",
        ),
    ],
)
def test_wrong_targets_are_named(targets, words):
    with pytest.raises(ValueError, match=words):
        detector().train()(pictures(SMALL), targets)


def test_the_pyramid_adds_a_level_of_stride_64():
    model = detector()
    maps = model.backbone(torch.rand(1, 3, 64, 96))
    assert [tuple(level.shape[-2:]) for level in maps.values()] == [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    assert {level.shape[1] for level in maps.values()} == {model.backbone.out_channels} == {WIDTH}
