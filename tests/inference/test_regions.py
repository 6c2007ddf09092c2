"""Mask R-CNN and its cascade as ONNX graphs: selection in numpy against torchvision, files against PyTorch."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import batched_nms as torch_batched_nms
from torchvision.ops import nms as torch_nms

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.heads.mask_rcnn import RegionDetector, set_strides
from saccade.inference.export import ExportError, describe_selection, export_model
from saccade.inference.export_check import TOLERANCE, check_export, differences
from saccade.inference.onnx_predict import OnnxModel
from saccade.inference.onnx_regions import Objects, RegionSessions, batched_nms, encode_masks, nms, paste_masks
from saccade.inference.region_graphs import LevelPool, MaskGraph, ProposalGraph, RegionGraph
from saccade.models.card import Card, Preprocess
from saccade.tasks.coco_metric import encode_masks as torch_encode_masks
from saccade.tasks.load import describe_model
from saccade.tasks.predict import predict
from saccade.tasks.results import Detections
from tests.heads.small_detectors import make_detector
from tests.torch_free import run_without_torch

pytest.importorskip("onnx", reason="needs saccade[export]")
pytest.importorskip("onnxscript", reason="needs saccade[export]")
pytest.importorskip("onnxruntime", reason="needs saccade[export]")

STRIDES = (4, 8, 16, 32)
CLASSES = ["disc", "ring", "bar"]
HEADS = ["mask_rcnn", "cascade_mask_rcnn"]
SIZES = [(64, 64), (67, 81), (96, 70)]  # the example has 160 x 224
PHOTO = str(photo_paths()["cat"])


@cache
def build(head: str = "mask_rcnn", **settings) -> RegionDetector:
    """A small detector whose scores and boxes vary, with its card."""
    model = make_detector(head, box_score_thresh=0.3, **settings).eval()
    set_strides(model, STRIDES)
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            large = name.endswith("cls_score.weight") or "cls_logits.weight" in name
            parameter.add_((0.5 if large else 0.03) * torch.randn(parameter.shape, generator=rng))
    model.card = Card("conv", 3, {}, CLASSES, Preprocess(64), "detection", head)
    return model


def random_boxes(count: int, side: float = 100.0) -> tuple[np.ndarray, np.ndarray]:
    """Boxes that overlap often, and scores."""
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, side, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(1, side / 2, (count, 2))], 1)
    return boxes.astype(np.float32), rng.uniform(size=count).astype(np.float32)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_nms_equals_torchvision(threshold):
    boxes, scores = random_boxes(400, side=40)
    expected = torch_nms(torch.from_numpy(boxes), torch.from_numpy(scores), threshold)
    assert 20 < len(expected) < 390
    assert nms(boxes, scores, threshold).tolist() == expected.tolist()


@pytest.mark.parametrize("count", [0, 1, 900, 1500])  # above 1000 torchvision splits by group
def test_batched_nms_equals_torchvision(count):
    boxes, scores = random_boxes(count)
    groups = np.arange(count) % 7
    expected = torch_batched_nms(*map(torch.from_numpy, (boxes, scores, groups)), 0.5)
    assert batched_nms(boxes, scores, groups, 0.5).tolist() == expected.tolist()


def test_pasted_masks_equal_torchvision():
    boxes, _ = random_boxes(30)
    boxes[0] = [-3, 40, 70, 99.5]
    boxes[1] = [10.2, 10.9, 10.5, 11.1]
    boxes = np.clip(boxes, -3, np.float32([99, 89, 100, 90]))
    masks = np.random.default_rng(1).uniform(size=(30, 28, 28)).astype(np.float32)
    expected = paste_masks_in_image(torch.from_numpy(masks)[:, None], torch.from_numpy(boxes), (90, 100))[:, 0] >= 0.5
    pasted = paste_masks(masks, boxes, 90, 100)
    assert np.array_equal(pasted, expected.numpy())
    assert encode_masks(pasted) == torch_encode_masks(expected)
    assert encode_masks(pasted[:0]) == []


@pytest.mark.parametrize("half_pixel", [False, True])
def test_pool_of_every_level_equals_the_pool_of_split_boxes(half_pixel):
    model = build(half_pixel=half_pixel)
    pool = model.region_stages[0].box_roi_pool
    features = [torch.randn(2, 4, 512 // stride, 640 // stride) for stride in STRIDES]
    corners = torch.rand(40, 2) * 100
    boxes = torch.cat([corners, corners + torch.logspace(0.3, 2.7, 40)[:, None]], 1)
    image = torch.arange(40) % 2
    expected = pool(
        {str(i): level for i, level in enumerate(features)}, [boxes[image == i] for i in (0, 1)], [(512, 640)] * 2
    )
    graph = LevelPool(pool)
    assert len(graph.levels(boxes).unique()) == 4
    actual = graph(features, boxes, image)
    torch.testing.assert_close(torch.cat([actual[image == 0], actual[image == 1]]), expected)


class TorchSession:
    """A graph of PyTorch with the interface of an ONNX Runtime session."""

    def __init__(self, graph):
        self.graph = graph

    def get_inputs(self):
        return [type("Input", (), {"name": name}) for name in self.graph.inputs]

    @torch.no_grad()
    def run(self, _, feeds):
        outputs = self.graph(*(torch.from_numpy(feeds[name]) for name in self.graph.inputs))
        return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", [{}, {"half_pixel": True}], ids=["torchvision", "half_pixel"])
@pytest.mark.parametrize("size", [(64, 64), (64, 90)])
def test_graphs_and_selection_equal_the_detector(head, options, size):
    model = build(head, **options)
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    sessions = RegionSessions.__new__(RegionSessions)
    sessions.settings = describe_selection(model)
    sessions.sessions = {"regions": TorchSession(RegionGraph(model)), "masks": TorchSession(MaskGraph(model))}
    with torch.no_grad():
        expected = model(list(images))
        outputs = ProposalGraph(model)(torch.stack([model.transform.normalize(image) for image in images]))
    actual = sessions([output.numpy() for output in outputs], size)
    for objects, target in zip(actual, expected, strict=True):
        assert len(target["scores"]) > 3
        np.testing.assert_allclose(objects.scores, target["scores"], atol=1e-6)
        np.testing.assert_allclose(objects.boxes, target["boxes"], atol=1e-4)
        assert objects.labels.tolist() == target["labels"].tolist()
        masks = paste_masks(objects.masks, target["boxes"].numpy(), *size)
        assert np.array_equal(masks, target["masks"][:, 0] >= 0.5)


def test_prediction_does_not_depend_on_the_image_seen_first():
    """torchvision infers the strides of the features from its first image, and wrongly from this one of 40 px."""
    torch.manual_seed(0)
    model = saccade.create_detector("vt_nano", "mask_rcnn", 2, min_size=40, max_size=64, width=16).eval()
    pools = [model.roi_heads.box_roi_pool, model.roi_heads.mask_roi_pool]
    assert [pool.scales for pool in pools] == [[1 / 2, 1 / 4, 1 / 8, 1 / 16]] * 2
    with torch.no_grad():
        model([torch.rand(3, 40, 60)])
    assert [pool.scales for pool in pools] == [[1 / 2, 1 / 4, 1 / 8, 1 / 16]] * 2
    assert (pools[0].map_levels.k_min, pools[0].map_levels.k_max) == (1, 4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Mask R-CNN with dynamic batch and size."""
    model = build()
    return model, export_model(model, tmp_path_factory.mktemp("regions") / "model.onnx")


def test_exported_mask_rcnn_agrees_at_other_sizes_and_batch_sizes(exported):
    model, export = exported
    rows = check_export(export.path, model, model.card, export.metadata, batches=(1, 3), sizes=SIZES)
    assert len(rows) == 6 * 4 + len(photo_paths())
    for name in ("proposals", "regions", "masks", "objects"):
        of_name = [row for row in rows if row.inputs.startswith(name)]
        shapes = {(row.batch, row.height, row.width) for row in of_name}
        assert shapes == {(batch, *size) for batch in (1, 3) for size in SIZES}
    assert max(row.relative for row in rows) < 1e-4  # the promise is 1e-3


def test_exported_mask_rcnn_is_three_linked_files(exported):
    import onnx

    _, export = exported
    names = ["model.onnx", "model.regions.onnx", "model.masks.onnx"]
    assert [file.name for file in export.files] == names
    assert sorted(file.name for file in export.path.parent.iterdir()) == sorted(names)
    assert export.bytes == sum(file.stat().st_size for file in export.files)
    shapes = {}
    for file in export.files:
        proto = onnx.load(file)
        onnx.checker.check_model(proto)
        assert {entry.domain for entry in proto.opset_import} <= {"", "ai.onnx"}
        for value in proto.graph.input:
            shapes[value.name] = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
    assert shapes["images"] == ["batch", 3, "height", "width"]
    assert shapes["features_3"] == ["batch", 16, "height_3", "width_3"]
    assert shapes["boxes"] == ["regions", 4]
    assert export.metadata["classes"] == CLASSES
    assert export.metadata["preprocess"]["min_size"] == 64


def test_parts_of_another_export_are_refused(exported, tmp_path):
    _, export = exported
    for file in export.files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"model.masks.onnx is a part of model.onnx"):
        OnnxModel(tmp_path / "model.masks.onnx")
    (tmp_path / "model.regions.onnx").write_bytes(export.files[2].read_bytes())
    with pytest.raises(ValueError, match=r"model.regions.onnx is not from the export that wrote"):
        OnnxModel(tmp_path / "model.onnx")
    (tmp_path / "model.regions.onnx").unlink()
    with pytest.raises(ValueError, match=r"expected model.regions.onnx next to .*Copy all files"):
        OnnxModel(tmp_path / "model.onnx")


def test_predict_of_exported_mask_rcnn_equals_predict_and_imports_no_torch(exported, tmp_path):
    model, export = exported
    arguments = ["predict", str(export.path), PHOTO, "--threshold", "0.35", "--out", str(tmp_path)]
    run_without_torch(arguments)
    (entry,) = json.loads((tmp_path / "predictions.json").read_text())["predictions"]
    expected = predict(model, PHOTO, threshold=0.35)[0].objects()
    assert len(expected) > 3
    assert [actual["label"] for actual in entry["objects"]] == [target["label"] for target in expected]
    assert [actual["name"] for actual in entry["objects"]] == [target["name"] for target in expected]
    assert [actual["segmentation"] for actual in entry["objects"]] == [target["segmentation"] for target in expected]
    for actual, target in zip(entry["objects"], expected, strict=True):
        assert actual["score"] == pytest.approx(target["score"], abs=1e-5)
        assert actual["box"] == pytest.approx(target["box"], abs=1e-2)


def test_image_without_objects_has_none(exported):
    _, export = exported
    runner = OnnxModel(export.path)
    assert runner.regions is not None
    runner.regions.settings = runner.regions.settings | {"box_score_thresh": 1.0}
    assert runner.detect(Image.open(PHOTO).convert("RGB")) == []


def test_check_finds_files_of_other_weights(exported):
    _, export = exported
    other = build(seed=5)
    rows = check_export(export.path, other, other.card, export.metadata, batches=(1,), sizes=[(64, 64)])
    for name in ("proposals", "regions", "masks", "objects"):
        (row,) = [row for row in rows if row.inputs.startswith(name)]
        assert row.relative > TOLERANCE["float32"], name


def test_differences_of_objects():
    boxes = torch.tensor([[0.0, 0, 50, 50], [20, 20, 100, 80]])
    target = Detections("", "", boxes, torch.tensor([1, 2]), torch.tensor([0.9, 0.6]), CLASSES, None, (100, 80))
    metadata = {"dtype": "float32", "selection": {"box_detections_per_img": 100, "box_score_thresh": 0.05}}
    same = Objects(boxes.numpy(), np.array([1, 2]), np.array([0.9, 0.6], np.float32))
    assert max(differences(target, same, metadata).values()) == 0
    moved = same._replace(boxes=same.boxes + np.float32([[0, 0, 0, 0], [1, 0, 0, 0]]))
    assert differences(target, moved, metadata)["boxes"] == pytest.approx(0.01)
    assert differences(target, moved, metadata | {"dtype": "int8"})["boxes"] == pytest.approx(0.005)
    renamed = differences(target, same._replace(labels=np.array([1, 3])), metadata)
    assert renamed["missing objects"] == pytest.approx(0.55)
    fewer = Objects(*(None if values is None else values[:1] for values in same))
    assert differences(target, fewer, metadata)["missing objects"] == pytest.approx(0.55)
    assert differences(target, same._replace(scores=np.float32([0.9, 0.61])), metadata)["scores"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.pt2", {"format": "pt2"}, "are exported to onnx, got format pt2"),
        ("model.onnx", {"with_preprocessing": True}, "depends on the image"),
        ("model.masks.onnx", {}, "expected another name than model.masks.onnx"),
    ],
)
def test_options_that_mask_rcnn_cannot_honour_are_refused(tmp_path, name, options, message):
    with pytest.raises(ExportError, match=message) as error:
        export_model(build(), tmp_path / name, **options)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("backbone", "options", "dtype"),
    [
        ("svit_nano", {}, "float32"),
        ("paca_nano", {"half_pixel": True, "exact_anchors": True}, "float32"),
        ("vt_nano", {"neck": "vt_fpn", "norm": "group"}, "float32"),
        ("vt_nano", {"masks": False}, "float32"),
        ("vt_nano", {}, "float16"),
        ("vt_nano", {}, "int8"),
    ],
)
def test_exported_detector_agrees(tmp_path, head, backbone, options, dtype):
    torch.manual_seed(0)
    sizes = {"min_size": 96, "max_size": 160, "width": 16, "box_score_thresh": 0.1}
    model = saccade.create_detector(backbone, head, 5, **sizes, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    card = describe_model(model.eval())
    value = None if dtype == "float32" else getattr(torch, dtype)
    export = export_model(model, tmp_path / "model.onnx", dtype=value, card=card)
    assert len(export.files) == (3 if options.get("masks", True) else 2)
    rows = check_export(export.path, model, card, export.metadata, sizes=SIZES)
    # Random weights: hundreds of anchors have the same objectness or the same float32 score after the sigmoid.
    # torch.topk and the sort in NMS order them arbitrarily, so the graphs are compared, not the objects.
    if options.get("neck") or (backbone, head) == ("vt_nano", "cascade_mask_rcnn"):
        rows = [row for row in rows if row.inputs in ("proposals", "regions", "masks")]
        assert len(rows) == 9 * len(export.files)
    worst = max(row.relative for row in rows)
    print(f"{backbone}+{head} {options} {dtype}: {export.bytes / 1e6:.1f} MB, {worst:.1e}")  # shown by -rP
    assert worst < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [(), ("batch",), ("size",)])
def test_fixed_axes_of_mask_rcnn_are_fixed(tmp_path, dynamic):
    model = build()
    export = export_model(model, tmp_path / "model.onnx", dynamic=dynamic, size=None if "size" in dynamic else 96)
    assert export.metadata["input"] == [
        "batch" if "batch" in dynamic else 1, 3, *(("height", "width") if "size" in dynamic else (96, 96)),
    ]  # fmt: skip
    rows = check_export(export.path, model, model.card, export.metadata)
    assert max(row.relative for row in rows) < 1e-4
