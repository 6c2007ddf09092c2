"""Released segmenters and detectors: OpenMMLab's layouts, classes, anchors and RoIAlign."""

import math

import pytest
import torch
from torchvision.models.detection.image_list import ImageList

import saccade
from saccade.heads.mmdet import ExactAnchorGenerator, HalfPixelRoIAlign
from saccade.models.card import Card, Preprocess, read_card, save_model
from saccade.models.checkpoint import CheckpointError
from saccade.models.official import mask_rcnn
from saccade.tasks.released import coco_classes, fetch_release
from saccade.weights.releases import find
from tests.tasks.test_segmentation_checkpoints import official_file


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("SACCADE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SACCADE_OFFLINE", "1")
    return tmp_path / "home"


def pull(name, checkpoint, tmp_path):
    torch.save(checkpoint, tmp_path / "authors.pth")
    return fetch_release(find(name), source=tmp_path / "authors.pth")


def test_released_segmenter_loads_whole(home, tmp_path):
    path = pull("paca_tiny+paca.ade20k", official_file(), tmp_path)
    model = saccade.create_segmenter("paca_tiny", "paca", pretrained="ade20k")
    expected = saccade.create_segmenter("paca_tiny", "paca", 150, backbone_kwargs={"clusters": (100, 100, 100, 0)})
    assert saccade.load_checkpoint(expected, official_file()).new == {}
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    card = read_card(path)
    assert (card.task, card.head, card.num_classes, card.shorter) == ("segmentation", "paca", 150, 512)
    assert card.kwargs == {"clusters": [100, 100, 100, 0]}
    other = saccade.create_segmenter("paca_tiny", "paca", 7, pretrained="ade20k")
    assert other.head.classifier.fc.weight.shape[0] == 7


def test_head_that_the_keys_decide_may_differ_from_the_table(home):
    model = saccade.create_segmenter("svit_nano", "fpn", 2, head_kwargs={"dim": 32, "branch_dim": 16})
    card = Card("svit_nano", 2, {}, [], Preprocess(), "segmentation", "upernet")
    save_model(model, home / "weights/paca_small+paca.ade20k_c2.safetensors", card)
    with pytest.raises(CheckpointError, match=r"ade20k_c2 with the head paca, got upernet in .* Use that head"):
        saccade.create_segmenter("paca_small", "paca", pretrained="ade20k_c2")


def official_detector(classes=80, width=256):
    """PaCa-Tiny with Mask R-CNN as mmdetection saves it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {}
    for i, channels in enumerate((96, 192, 320, 384)):
        shapes[f"neck.lateral_convs.{i}.conv"] = (width, channels, 1, 1)
        shapes[f"neck.fpn_convs.{i}.conv"] = (width, width, 3, 3)
        shapes[f"roi_head.mask_head.convs.{i}.conv"] = (width, width, 3, 3)
    shapes["rpn_head.rpn_conv"] = (width, width, 3, 3)
    shapes["rpn_head.rpn_cls"], shapes["rpn_head.rpn_reg"] = (3, width, 1, 1), (12, width, 1, 1)
    shapes["roi_head.bbox_head.shared_fcs.0"] = (1024, width * 49)
    shapes["roi_head.bbox_head.shared_fcs.1"] = (1024, 1024)
    shapes["roi_head.bbox_head.fc_cls"] = (classes + 1, 1024)
    shapes["roi_head.bbox_head.fc_reg"] = (4 * classes, 1024)
    shapes["roi_head.mask_head.upsample"] = (width, width, 2, 2)
    shapes["roi_head.mask_head.conv_logits"] = (classes, width, 1, 1)
    parts = {k: v for k, v in official_file()["state_dict"].items() if k.startswith("backbone.")}
    for name, shape in shapes.items():
        parts[f"{name}.weight"] = 0.02 * torch.randn(shape, generator=generator)
        parts[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
    return {"meta": {}, "state_dict": parts}


def test_released_detector_loads_whole(home, tmp_path):
    checkpoint = official_detector()
    theirs = checkpoint["state_dict"]
    pull("paca_tiny+mask_rcnn.coco", checkpoint, tmp_path)
    model = saccade.create_detector("paca_tiny", "mask_rcnn", pretrained="coco").eval()
    assert model.num_classes == 80
    assert isinstance(model.rpn.anchor_generator, ExactAnchorGenerator)
    assert isinstance(model.roi_heads.mask_roi_pool, HalfPixelRoIAlign)
    predictor, masks = model.roi_heads.box_predictor, model.roi_heads.mask_predictor
    person, background = theirs["roi_head.bbox_head.fc_cls.weight"][0], theirs["roi_head.bbox_head.fc_cls.weight"][80]
    assert torch.equal(predictor.cls_score.weight[1], person)
    assert torch.equal(predictor.cls_score.weight[0], background)
    assert torch.equal(predictor.bbox_pred.bias[4:], theirs["roi_head.bbox_head.fc_reg.bias"])
    assert torch.equal(masks.mask_fcn_logits.weight[80], theirs["roi_head.mask_head.conv_logits.weight"][79])
    assert not masks.mask_fcn_logits.weight[0].any()
    opened = saccade.load("paca_tiny+mask_rcnn")
    card = opened.card
    assert card.names[0] == "person"
    assert card.names[79] == "toothbrush"
    assert isinstance(opened.rpn.anchor_generator, ExactAnchorGenerator)
    assert torch.equal(opened.rpn.head.cls_logits.bias, theirs["rpn_head.rpn_cls.bias"])


def test_unknown_detector_keys_are_refused(home, tmp_path):
    checkpoint = official_detector()
    checkpoint["state_dict"]["rpn_head.extra.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"does not have rpn_head\.extra\.weight"):
        pull("paca_tiny+mask_rcnn.coco", checkpoint, tmp_path)
    assert not list((home / "weights").glob("*.safetensors"))


def test_classes_move_to_the_end_of_the_background():
    theirs = {
        "roi_head.bbox_head.fc_cls.bias": torch.tensor([1.0, 2.0, 9.0]),
        "roi_head.bbox_head.fc_reg.bias": torch.arange(8.0),
    }
    ours = mask_rcnn.convert(theirs)
    assert ours["roi_heads.box_predictor.cls_score.bias"].tolist() == [9, 1, 2]
    assert ours["roi_heads.box_predictor.bbox_pred.bias"].tolist() == [0, 0, 0, 0, *range(8)]
    assert len(coco_classes()) == 80


def test_exact_anchors_match_the_formula_of_mmdetection():
    """Base size: stride times 8; ratio: height / width; centres at multiples of the stride, also of 64 in 800 px."""
    generator = ExactAnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    sides = [200, 100, 50, 25, 13]
    maps = [torch.empty(1, 1, side, side, dtype=torch.bfloat16) for side in sides]
    (anchors,) = generator(ImageList(torch.empty(1, 3, 800, 800), [(800, 800)]), maps)
    assert anchors.dtype == torch.float32
    expected = []
    for level, side in enumerate(sides):
        stride = 4 * 2**level
        for row in range(side):
            for column in range(side):
                for ratio in (0.5, 1.0, 2.0):
                    width, height = 8 * stride / math.sqrt(ratio), 8 * stride * math.sqrt(ratio)
                    x, y = column * stride, row * stride
                    expected.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
    torch.testing.assert_close(anchors, torch.tensor(expected), atol=1e-3, rtol=1e-6)


def test_half_pixel_roi_align_matches_a_slow_loop():
    """A cell is the mean of ceil(size) x ceil(size) bilinear samples; pixel (0, 0) has its centre at 0.5."""
    generator = torch.Generator().manual_seed(0)
    levels = {str(i): torch.randn(1, 2, 64 // 2**i, 64 // 2**i, generator=generator) for i in range(4)}
    boxes = torch.tensor([[10.0, 20.0, 51.0, 60.0], [8.0, 8.0, 200.0, 170.0]])  # of levels 0 and 1
    pooled = HalfPixelRoIAlign(["0", "1", "2", "3"], 7)(levels, [boxes], [(256, 256)])

    def sample(features, y, x):
        y, x = min(max(y, 0), features.shape[1] - 1), min(max(x, 0), features.shape[2] - 1)
        y0, x0 = min(int(y), features.shape[1] - 2), min(int(x), features.shape[2] - 2)
        dy, dx = y - y0, x - x0
        top = (1 - dx) * features[:, y0, x0] + dx * features[:, y0, x0 + 1]
        bottom = (1 - dx) * features[:, y0 + 1, x0] + dx * features[:, y0 + 1, x0 + 1]
        return (1 - dy) * top + dy * bottom

    for box, level, cells in ((boxes[0], 0, pooled[0]), (boxes[1], 1, pooled[1])):
        x0, y0, x1, y1 = (box / (4 * 2**level) - 0.5).tolist()
        for row, column in ((0, 0), (3, 5), (6, 6)):
            height, width = (y1 - y0) / 7, (x1 - x0) / 7
            rows, columns = math.ceil(height), math.ceil(width)
            values = [
                sample(
                    levels[str(level)][0],
                    y0 + (row + (i + 0.5) / rows) * height,
                    x0 + (column + (j + 0.5) / columns) * width,
                )
                for i in range(rows)
                for j in range(columns)
            ]
            torch.testing.assert_close(cells[:, row, column], torch.stack(values).mean(0))
