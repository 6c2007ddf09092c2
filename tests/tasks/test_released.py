"""Released segmenters and detectors: OpenMMLab's layouts, classes, anchors and RoIAlign."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import nms, roi_align

import saccade
from saccade.data.sources.class_names import COCO_THINGS
from saccade.heads.mmdet import ExactAnchorGenerator, HalfPixelRoIAlign, TwoSidedBoxCoder
from saccade.models.card import Card, Preprocess, read_card, save_model
from saccade.models.official import mask_rcnn
from saccade.tasks.released import fetch_release
from saccade.weights.read import CheckpointError
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
    assert len(COCO_THINGS) == 80
    assert COCO_THINGS[::40] == ["person", "wine glass"]


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


class MmdetectionMaskRCNN:
    """Inference of mmdetection's Mask R-CNN on one image, written from its published formulas and its own names."""

    def __init__(self, weights, image_size, num_proposals=1000, num_boxes=100):
        self.weights, (self.height, self.width) = weights, image_size
        self.num_proposals, self.num_boxes = num_proposals, num_boxes

    def layer(self, function, name, values, **options):
        return function(values, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **options)

    def pyramid(self, maps):
        levels = [self.layer(F.conv2d, f"neck.lateral_convs.{i}.conv", level) for i, level in enumerate(maps)]
        for i in (3, 2, 1):
            levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], size=levels[i - 1].shape[2:], mode="nearest")
        levels = [self.layer(F.conv2d, f"neck.fpn_convs.{i}.conv", level, padding=1) for i, level in enumerate(levels)]
        return [*levels, F.max_pool2d(levels[-1], 1, stride=2)]

    def decode(self, boxes, deltas, stds):
        """Centre + delta * size, size * exp(delta); the logarithm of a change of size is at most log(1000 / 16)."""
        deltas = deltas * torch.tensor(stds, dtype=deltas.dtype)
        limit = abs(math.log(16 / 1000))
        size = boxes[:, 2:] - boxes[:, :2]
        centre = (boxes[:, :2] + boxes[:, 2:]) / 2 + deltas[:, :2] * size
        size = size * deltas[:, 2:].clamp(-limit, limit).exp()
        x, y = centre.unbind(1)
        w, h = size.unbind(1)
        sides = (x - w / 2).clamp(0, self.width), (y - h / 2).clamp(0, self.height)
        return torch.stack([*sides, (x + w / 2).clamp(0, self.width), (y + h / 2).clamp(0, self.height)], 1)

    def proposals(self, levels):
        boxes, scores = [], []
        for i, level in enumerate(levels):
            hidden = self.layer(F.conv2d, "rpn_head.rpn_conv", level, padding=1).relu()
            objectness = self.layer(F.conv2d, "rpn_head.rpn_cls", hidden)[0].permute(1, 2, 0).flatten().sigmoid()
            deltas = self.layer(F.conv2d, "rpn_head.rpn_reg", hidden)[0].permute(1, 2, 0).reshape(-1, 4)
            top, order = objectness.sort(descending=True)
            top, order = top[:1000], order[:1000]
            decoded = self.decode(self.anchors(i, *level.shape[2:])[order], deltas[order], (1, 1, 1, 1))
            valid = (decoded[:, 2:] > decoded[:, :2]).all(1)
            decoded, top = decoded[valid], top[valid]
            survivors = nms(decoded, top, 0.7)
            boxes.append(decoded[survivors])
            scores.append(top[survivors])
        return torch.cat(boxes)[torch.cat(scores).sort(descending=True)[1][: self.num_proposals]]

    def anchors(self, level, rows, columns):
        stride = 4 * 2**level
        shapes = [(8 * stride / math.sqrt(ratio), 8 * stride * math.sqrt(ratio)) for ratio in (0.5, 1.0, 2.0)]
        cells = [(column * stride, row * stride) for row in range(rows) for column in range(columns)]
        corners = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y in cells for w, h in shapes]
        return torch.tensor(corners, dtype=torch.float64)

    def pool(self, levels, boxes, side):
        """Level floor(log2(sqrt(area) / 56)); RoIAlign with half-pixel centres and adaptive sampling."""
        pooled = []
        for box in boxes:
            root = math.sqrt((box[2] - box[0]) * (box[3] - box[1]))
            i = min(max(math.floor(math.log2(root / 56 + 1e-6)), 0), 3)
            region = torch.cat([box.new_zeros(1), box])[None]
            pooled.append(roi_align(levels[i], region, (side, side), 1 / (4 * 2**i), sampling_ratio=0, aligned=True))
        return torch.cat(pooled)

    def predict(self, maps):
        """Boxes, labels from 0, scores and mask probabilities (n, 28, 28), by decreasing score."""
        levels = self.pyramid(maps)
        proposals = self.proposals(levels)
        hidden = self.pool(levels, proposals, 7).flatten(1)
        for i in range(2):
            hidden = self.layer(F.linear, f"roi_head.bbox_head.shared_fcs.{i}", hidden).relu()
        probabilities = self.layer(F.linear, "roi_head.bbox_head.fc_cls", hidden).softmax(1)[:, :-1]  # background last
        deltas = self.layer(F.linear, "roi_head.bbox_head.fc_reg", hidden).view(len(proposals), -1, 4)
        boxes, labels, scores = [], [], []
        for k in range(probabilities.shape[1]):
            decoded = self.decode(proposals, deltas[:, k], (0.1, 0.1, 0.2, 0.2))
            inside = (decoded[:, 2:] - decoded[:, :2] >= 0.01).all(1)  # torchvision's rule; mmdetection has none here
            chosen = (probabilities[:, k] > 0.05) & inside
            decoded, probability = decoded[chosen], probabilities[chosen, k]
            survivors = nms(decoded, probability, 0.5)
            boxes.append(decoded[survivors])
            scores.append(probability[survivors])
            labels.append(torch.full((len(survivors),), k))
        scores, order = torch.cat(scores).sort(descending=True)
        order, scores = order[: self.num_boxes], scores[: self.num_boxes]
        boxes, labels = torch.cat(boxes)[order], torch.cat(labels)[order]
        hidden = self.pool(levels, boxes, 14)
        for i in range(4):
            hidden = self.layer(F.conv2d, f"roi_head.mask_head.convs.{i}.conv", hidden, padding=1).relu()
        hidden = self.layer(F.conv_transpose2d, "roi_head.mask_head.upsample", hidden, stride=2).relu()
        logits = self.layer(F.conv2d, "roi_head.mask_head.conv_logits", hidden)
        return boxes, labels, scores, logits[torch.arange(len(labels)), labels].sigmoid()


def test_released_detector_predicts_what_mmdetection_would():
    """Class order, flattening, box coder, anchors and RoIAlign combined, in float64 but for the anchors."""
    checkpoint = official_detector(classes=4)
    theirs = checkpoint["state_dict"]
    theirs["roi_head.bbox_head.fc_cls.bias"] *= 0  # several classes, not one that the mean of the features prefers
    theirs["roi_head.bbox_head.fc_cls.weight"] -= theirs["roi_head.bbox_head.fc_cls.weight"].mean(1, keepdim=True)
    options = {"exact_anchors": True, "half_pixel": True, "backbone_kwargs": {"clusters": (100, 100, 100, 0)}}
    options |= {"rpn_post_nms_top_n_test": 60, "box_detections_per_img": 16}  # for speed
    model = saccade.create_detector("paca_tiny", "mask_rcnn", 4, **options)
    saccade.load_checkpoint(model, checkpoint)
    model.double().eval()
    size = (96, 160)
    images = torch.rand(1, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = model.backbone(images)
        proposals, _ = model.rpn(ImageList(images, [size]), features)
        (ours,), _ = model.roi_heads(features, proposals, [size])
        maps = model.backbone.body(images)
        maps = list(maps.values()) if isinstance(maps, dict) else maps
        weights = {key: value.double() for key, value in theirs.items()}
        expected = MmdetectionMaskRCNN(weights, size, 60, 16).predict(maps)
    boxes, labels, scores, masks = expected
    assert len(boxes) == 16
    assert len(labels.unique()) > 1
    torch.testing.assert_close(ours["scores"], scores, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours["labels"], labels + 1)
    torch.testing.assert_close(ours["boxes"], boxes, atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(ours["masks"][:, 0], masks, atol=1e-5, rtol=1e-5)


def test_changes_of_size_are_clamped_on_both_sides():
    coder, boxes = TwoSidedBoxCoder((10.0, 10.0, 5.0, 5.0)), torch.tensor([[0.0, 0.0, 100.0, 50.0]])
    deltas = torch.tensor([[10.0, 0.0, -500.0, 500.0, 0.0, 10.0, 5 * math.log(2), 0.0]])
    decoded = coder.decode_single(deltas, boxes)[0]
    width, height = 100 * 16 / 1000, 50 * 1000 / 16
    torch.testing.assert_close(
        decoded[:4], torch.tensor([150 - width / 2, 25 - height / 2, 150 + width / 2, 25 + height / 2])
    )
    torch.testing.assert_close(decoded[4:], torch.tensor([-50.0, 50.0, 150.0, 100.0]))
