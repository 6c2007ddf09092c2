"""create_detector: heads on named backbones, and SparseFormer itself as a detector."""

import numpy as np
import pytest
import torch

import saccade
from saccade.layers.boxes import adjust
from saccade.tasks.detection import MULTI_SCALE_SIDES
from saccade.tasks.sparse_detector import init_detection_tokens
from tests.heads.small import check_learning, target
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
SIZE, OTHER = (64, 64), (48, 96)


def pictures(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.rand(3, *size, generator=dice) for size in sizes]


def sparse(**options):
    torch.manual_seed(0)
    settings = dict(num_tokens=20, detect_tokens=12, min_size=64, max_size=128) | options
    return saccade.create_detector("sparseformer_nano", "sparse", 3, **settings)


@pytest.mark.parametrize(
    "backbone", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano", "resnet18", "pvt_v2_b0"]
)
def test_mask_rcnn_on_every_family_and_on_timms_backbones(backbone):
    torch.manual_seed(0)
    model = saccade.create_detector(backbone, "mask_rcnn", 3, **SMALL).train()
    losses = model(pictures(SIZE, OTHER), [target([[4, 4, 40, 40]], [2], SIZE), target([], [], OTHER)])
    check_learning(model, losses)
    with torch.no_grad():
        found = model.eval()(pictures(OTHER))[0]
    assert found["masks"].shape[1:] == (1, *OTHER)


def test_backbones_that_give_channels_last_maps():
    options = {"strict_img_size": False, "embed_dim": 24, "depths": (1, 1, 1, 1), "window_size": 4}
    model = saccade.create_detector("swin_tiny_patch4_window7_224", backbone_kwargs=options, num_classes=3, **SMALL)
    maps = model.backbone(torch.rand(1, 3, 64, 128))
    assert [tuple(level.shape) for level in maps.values()][:4] == [(1, 16, 64 // s, 128 // s) for s in (4, 8, 16, 32)]


def test_a_backbones_file_fills_the_backbone_and_nothing_else(tmp_path):
    torch.manual_seed(0)
    trained = saccade.create_model("svit_nano", num_classes=7)
    saccade.save_checkpoint(trained, tmp_path / "svit.safetensors")
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, checkpoint=tmp_path / "svit.safetensors", **SMALL)
    body, given = model.backbone.body.model.state_dict(), trained.state_dict()
    assert set(body) <= set(given)
    assert all(torch.equal(value, given[name]) for name, value in body.items())


def test_an_authors_detector_gives_its_backbone():
    """PaCa's Mask R-CNN files come from mmdetection: `state_dict` with backbone.*, neck.*, rpn_head.*, roi_head.*."""
    official = weights("pacavit_tiny_p2cconv_100_0")
    backbone = {f"backbone.{name}": value for name, value in official.items() if not name.startswith("head.")}
    others = {"neck.lateral_convs.0.conv.weight": torch.zeros(1), "roi_head.bbox_head.fc_cls.weight": torch.zeros(1)}
    file = {"state_dict": backbone | others, "meta": {"epoch": 12}}
    ours = saccade.convert_official(file, "paca_tiny")
    assert not any(name.startswith(("neck", "roi_head", "backbone")) for name in ours)
    model = saccade.create_detector("paca_tiny", "mask_rcnn", 3, checkpoint=file, **SMALL)
    for name, value in model.backbone.body.model.state_dict().items():
        assert torch.equal(value, ours[name]), name


def test_several_shorter_sides_are_drawn_in_training_and_the_last_is_kept_for_evaluation():
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, **(SMALL | dict(min_size=(64, 80))))
    seen = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[-2:])))
    torch.manual_seed(0)
    for _ in range(6):
        model.train()(pictures(SIZE), [target([[4, 4, 40, 40]], [2], SIZE)])
    assert set(seen) == {(64, 64), (96, 96)}  # 80 px are padded to a multiple of 32
    with torch.no_grad():
        model.eval()(pictures(SIZE))
    assert seen[-1] == (96, 96)
    assert (MULTI_SCALE_SIDES[0], MULTI_SCALE_SIDES[-1]) == (480, 800)


def test_a_level_may_have_anchors_of_several_sizes():
    sizes = [[8, 16], [24, 32], [48, 64], [96, 128], [192, 256]]
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, min_size=64, max_size=64, width=16, anchor_sizes=sizes)
    anchors = []
    model.rpn.anchor_generator.register_forward_hook(lambda _, __, out: anchors.append(out[0]))
    with torch.no_grad():
        model.eval()(pictures(SIZE))
    cells = [16 * 16, 8 * 8, 4 * 4, 2 * 2, 1]
    assert len(anchors[0]) == 6 * sum(cells)
    per_level = anchors[0].split([6 * count for count in cells])
    for level, wanted in zip(per_level, sizes, strict=True):
        sides = ((level[:6, 2:] - level[:6, :2]).prod(1)).sqrt()  # of the first cell; corners are rounded
        torch.testing.assert_close(sides.view(3, 2).mean(0), torch.tensor(wanted).float(), rtol=0.15, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (dict(head="yolo"), ValueError, "head must be one of mask_rcnn, cascade_mask_rcnn, sparse"),
        (dict(num_classes=0), ValueError, "num_classes must be at least 1, got 0"),
        (dict(box_nms_tresh=0.5), TypeError, "Did you mean box_nms_thresh"),
        (dict(norm="layer"), ValueError, "norm must be one of"),
        (dict(anchor_sizes=(8, 16)), ValueError, "5 levels"),
        (dict(anchor_sizes=((8, 16), 32, 64, 128, 256)), ValueError, "the same number of sizes per level"),
        (dict(head="sparse"), ValueError, "expected a sparseformer_\\* backbone, got svit_nano"),
        (dict(backbone="svit_nan"), ValueError, "Did you mean"),
    ],
)
def test_wrong_calls_are_told_what_would_be_right(call, error, words):
    with pytest.raises(error, match=words):
        saccade.create_detector(**({"backbone": "svit_nano", "head": "mask_rcnn", "num_classes": 3} | call))


def test_a_detector_is_recorded_like_its_backbone():
    model = saccade.create_detector("svit_nano", "mask_rcnn", 3, **SMALL).eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(pictures(SIZE))
    assert next(trace.name.rpartition("model.")[2] for trace in traces) == "stages.0.blocks.0"
    assert traces[0].maps().shape == (1, 16, 16, 16)
    model = sparse().eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(pictures(SIZE))
    assert [trace.regions.shape for trace in traces] == [(1, 20, 4)] * 5  # four passes of focusing, one of the cortex


# The sparse detector


def test_tokens_start_scattered_over_the_picture():
    """400 tokens, normal embeddings, centres uniform on [0, 1], half the picture wide and high (SF-67)."""
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", num_classes=0, num_tokens=400)
    init_detection_tokens(model)
    regions = model.regions.detach()
    centre, side = (regions[:, :2] + regions[:, 2:]) / 2, regions[:, 2:] - regions[:, :2]
    torch.testing.assert_close(side, torch.full_like(side, 0.5))
    assert centre.min() >= 0
    assert centre.max() <= 1
    assert np.histogram(centre.numpy(), 4, (0, 1))[0].min() > 150  # 200 expected
    embeddings = model.embeddings.detach()
    assert abs(float(embeddings.mean())) < 0.02
    assert abs(float(embeddings.std()) - 1) < 0.02


def test_at_first_a_box_is_the_last_region_and_later_it_is_adjusted_once_more():
    model = sparse().eval()
    batch, _ = model.transform(pictures(SIZE))
    with torch.no_grad():
        tokens, regions = model.forward_tokens(batch)
        logits, boxes = model.head(tokens, regions)
        assert logits.shape == (1, 12, 4)
        torch.testing.assert_close(boxes, regions[:, :12])
        model.head.to_delta[2].bias.copy_(torch.tensor([0.5, 0.0, 0.0, 1.0]))
        _, moved = model.head(tokens, regions)
        torch.testing.assert_close(moved, adjust(boxes, torch.tensor([0.5, 0.0, 0.0, 1.0]).expand_as(boxes)))


def test_every_token_answers_once_and_without_suppression():
    """Twelve tokens, twelve boxes at most; equal boxes stay."""
    model = sparse().eval()
    with torch.no_grad():
        model.backbone.regions.copy_(torch.tensor([0.25, 0.25, 0.75, 0.75]).expand(20, 4))
        for found, (height, width) in zip(model(pictures(SIZE, OTHER)), (SIZE, OTHER), strict=True):
            assert len(found["boxes"]) == 12
            torch.testing.assert_close(
                found["boxes"][0], torch.tensor([0.25 * width, 0.25 * height, 0.75 * width, 0.75 * height])
            )
            assert (found["scores"].diff() <= 0).all()
            assert set(found["labels"].tolist()) <= {1, 2, 3}


def test_a_small_picture_is_seen_alike_alone_and_beside_a_larger_one():
    """Regions are relative to the picture, not to the padded batch."""
    model = sparse(min_size=64).eval()
    with torch.no_grad():
        for parameter in (model.backbone.focus.blocks[0].look.adjuster.to_delta.weight, model.head.to_delta[2].weight):
            torch.nn.init.normal_(parameter, std=0.2)
        small, large = pictures((64, 64), (64, 128))

        def boxes(images: list) -> torch.Tensor:
            """(P, 4) of the first picture, in units of it, in the tokens' order."""
            batch, _ = model.transform(images)
            return model.head(*model.forward_tokens(batch))[1][0]

        fresh = model.backbone.regions[: len(boxes([small]))]
        moved, apart = (boxes([small]) - fresh).abs().mean(), (boxes([small]) - boxes([small, large])).abs()
    # What differs is what a token sees beyond the border: nothing when alone, padding when not. Read in units of the
    # batch, which is twice as wide, places would differ by half of themselves.
    assert moved > 0.05
    assert apart.median() < 0.02
    assert apart.mean() < moved / 5


@pytest.mark.parametrize("auxiliary", [False, True])
def test_the_sparse_detector_learns_with_every_parameter(auxiliary):
    model = sparse(auxiliary=auxiliary).train()
    crowd = [[6.0 * (i % 10), 6.0 * (i // 10), 6.0 * (i % 10) + 9, 6.0 * (i // 10) + 9] for i in range(100)]
    targets = [target([[4, 4, 40, 40]], [2], SIZE), target([], [], OTHER), target(crowd, [1] * 100, SIZE)]
    losses = model(pictures(SIZE, OTHER, SIZE), targets)
    assert len(losses) == (3 * 6 if auxiliary else 3)  # six blocks of the cortex
    check_learning(model, losses)


def test_nothing_surer_than_the_threshold_is_an_answer():
    with torch.no_grad():
        (found,) = sparse(score_thresh=0.999).eval()(pictures(SIZE))
    assert found["boxes"].shape == (0, 4)
    assert found["scores"].shape == found["labels"].shape == (0,)


def test_more_detecting_tokens_than_tokens_is_refused():
    with pytest.raises(ValueError, match=r"detect_tokens \(12\) must not exceed num_tokens \(8\)"):
        sparse(num_tokens=8, detect_tokens=12)


def test_a_classifiers_file_starts_the_sparse_detector_with_new_tokens(tmp_path):
    torch.manual_seed(0)
    trained = saccade.create_model("sparseformer_nano", num_classes=5)  # 36 tokens
    saccade.save_checkpoint(trained, tmp_path / "s.safetensors")
    model = sparse(checkpoint=tmp_path / "s.safetensors")
    assert model.backbone.embeddings.shape == (20, 128)
    for name, value in model.backbone.state_dict().items():
        if name not in ("embeddings", "regions"):
            assert torch.equal(value, trained.state_dict()[name]), name
