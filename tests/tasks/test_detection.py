"""create_detector: region heads on named backbones, options and checkpoints."""

import pytest
import torch

import saccade
from saccade.tasks.detection import DETECTION_HEADS, MULTI_SCALE_SIDES, NORM_LAYERS
from tests.heads.small_detectors import fill_zero_parameters, make_target, random_images, zero_gradients
from tests.parity.kit import weights

SMALL = dict(
    min_size=64,
    max_size=128,
    width=16,
    rpn_post_nms_top_n_train=20,
    rpn_post_nms_top_n_test=20,
    box_batch_size_per_image=16,
    box_score_thresh=0.0,
    norm="group",
)
SIZE, OTHER_SIZE = (64, 64), (48, 96)


@pytest.mark.shows("X-03")
def test_heads_are_three():
    assert DETECTION_HEADS == ("mask_rcnn", "cascade_mask_rcnn", "sparse")


@pytest.mark.parametrize(
    "backbone", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano", "resnet18", "pvt_v2_b0"]
)
def test_mask_rcnn_trains_every_parameter_of_every_backbone(backbone):
    torch.manual_seed(0)
    model = saccade.create_detector(backbone, "mask_rcnn", 3, **SMALL).train()
    fill_zero_parameters(model)
    targets = [make_target([[4, 4, 40, 40]], [2], SIZE), make_target([], [], OTHER_SIZE)]
    losses = model(random_images(SIZE, OTHER_SIZE), targets)
    assert zero_gradients(model, losses) == []
    with torch.no_grad():
        prediction = model.eval()(random_images(OTHER_SIZE))[0]
    assert prediction["masks"].shape[1:] == (1, *OTHER_SIZE)


def test_channels_last_feature_maps_are_accepted():
    options = {"strict_img_size": False, "embed_dim": 24, "depths": (1, 1, 1, 1), "window_size": 4}
    model = saccade.create_detector("swin_tiny_patch4_window7_224", backbone_kwargs=options, num_classes=3, **SMALL)
    maps = model.backbone(torch.rand(1, 3, 64, 128))
    assert [tuple(level.shape) for level in maps.values()][:4] == [(1, 16, 64 // s, 128 // s) for s in (4, 8, 16, 32)]


def test_images_are_normalised_with_the_backbones_statistics():
    model = saccade.create_detector("vit_base_patch16_clip_224", "mask_rcnn", 3, backbone_kwargs={"depth": 4}, **SMALL)
    assert model.transform.image_mean == pytest.approx([0.48145466, 0.4578275, 0.40821073])
    assert model.transform.image_std == pytest.approx([0.26862954, 0.26130258, 0.27577711])


def test_classifier_checkpoint_fills_the_backbone(tmp_path):
    torch.manual_seed(0)
    trained = saccade.create_model("svit_nano", num_classes=7)
    saccade.save_checkpoint(trained, tmp_path / "svit.safetensors")
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, checkpoint=tmp_path / "svit.safetensors", **SMALL)
    backbone, given = model.backbone.body.model.state_dict(), trained.state_dict()
    assert set(backbone) == {name for name in given if name in backbone}
    assert all(torch.equal(value, given[name]) for name, value in backbone.items())


def test_authors_detector_checkpoint_fills_the_backbone():
    """PaCa's Mask R-CNN files come from mmdetection: `state_dict` with backbone.*, neck.*, rpn_head.*, roi_head.*."""
    official = weights("pacavit_tiny_p2cconv_100_0")
    backbone = {f"backbone.{name}": value for name, value in official.items() if not name.startswith("head.")}
    head = {"neck.lateral_convs.0.conv.weight": torch.zeros(1), "roi_head.bbox_head.fc_cls.weight": torch.zeros(1)}
    file = {"state_dict": backbone | head, "meta": {"epoch": 12}}
    ours = saccade.convert_official(file, "paca_tiny")
    assert not any(name.startswith(("neck", "roi_head", "backbone")) for name in ours)
    model = saccade.create_detector("paca_tiny", "mask_rcnn", 3, checkpoint=file, **SMALL)
    for name, value in model.backbone.body.model.state_dict().items():
        assert torch.equal(value, ours[name]), name


def test_detector_checkpoint_with_other_classes_fills_all_but_class_layers():
    torch.manual_seed(0)
    trained = saccade.create_detector("svit_nano", "mask_rcnn", 7, **SMALL)
    theirs = trained.state_dict()
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, checkpoint=theirs, **SMALL)
    ours = model.state_dict()
    reshaped = [name for name, value in ours.items() if value.shape != theirs[name].shape]
    layers = ("box_predictor.cls_score", "box_predictor.bbox_pred", "mask_predictor.mask_fcn_logits")
    assert reshaped == [f"roi_heads.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items() if name not in reshaped)


def test_shorter_side_is_sampled_in_training_and_the_last_in_evaluation():
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, **(SMALL | dict(min_size=(64, 80))))
    sizes = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[-2:])))
    torch.manual_seed(0)
    for _ in range(6):
        model.train()(random_images(SIZE), [make_target([[4, 4, 40, 40]], [2], SIZE)])
    assert set(sizes) == {(64, 64), (96, 96)}  # 80 px are padded to a multiple of 32
    with torch.no_grad():
        model.eval()(random_images(SIZE))
    assert sizes[-1] == (96, 96)
    assert MULTI_SCALE_SIDES == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)


def test_levels_accept_several_anchor_sizes():
    sizes = [[8, 16], [24, 32], [48, 64], [96, 128], [192, 256]]
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, min_size=64, max_size=64, width=16, anchor_sizes=sizes)
    anchors = []
    model.rpn.anchor_generator.register_forward_hook(lambda _, __, out: anchors.append(out[0]))
    with torch.no_grad():
        model.eval()(random_images(SIZE))
    cells = [16 * 16, 8 * 8, 4 * 4, 2 * 2, 1]
    assert len(anchors[0]) == 6 * sum(cells)
    per_level = anchors[0].split([6 * count for count in cells])
    for level, expected in zip(per_level, sizes, strict=True):
        sides = ((level[:6, 2:] - level[:6, :2]).prod(1)).sqrt()  # of the first cell; corners are rounded
        torch.testing.assert_close(sides.view(3, 2).mean(0), torch.tensor(expected).float(), rtol=0.15, atol=0)


def test_group_norm_has_8_channels_per_group():
    assert [(norm.num_groups, norm.num_channels) for norm in map(NORM_LAYERS["group"], (256, 16, 4))] == [
        (32, 256), (2, 16), (1, 4)]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (dict(head="yolo"), ValueError, "head must be one of mask_rcnn, cascade_mask_rcnn, sparse"),
        (dict(num_classes=0), ValueError, "num_classes must be at least 1, got 0"),
        (dict(box_nms_tresh=0.5), TypeError, "mask_rcnn has no option 'box_nms_tresh'. Did you mean box_nms_thresh"),
        (dict(norm="layer"), ValueError, "norm must be one of"),
        (dict(anchor_sizes=(8, 16)), ValueError, r"expected anchor_sizes for 5 levels, .*got \(8, 16\)"),
        (dict(anchor_sizes=((8, 16), 32, 64, 128, 256)), ValueError, "the same number of sizes per level"),
        (dict(head="sparse"), ValueError, r"expected a sparseformer_\* backbone for the sparse head, got svit_nano"),
        (dict(backbone="svit_nan"), ValueError, "Did you mean"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        saccade.create_detector(**({"backbone": "svit_nano", "head": "mask_rcnn", "num_classes": 3} | call))


def test_traces_of_the_backbone_are_reported():
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, **SMALL).eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(random_images(SIZE))
    assert next(trace.name.rpartition("model.")[2] for trace in traces) == "stages.0.blocks.0"
    assert traces[0].maps().shape == (1, 16, 16, 16)
