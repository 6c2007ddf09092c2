"""Exported files against the PyTorch model: every family, task and format, at sizes and batches of no example."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.data.transforms.image import eval_transform
from saccade.inference import export as module
from saccade.inference.export import (
    DetectorGraph,
    ExportError,
    NormalizeImages,
    ResizeAndCrop,
    custom_operators,
    export_model,
)
from saccade.inference.export_check import TOLERANCE, check_export, check_sizes
from saccade.inference.onnx_predict import OnnxModel
from saccade.models.card import Preprocess
from saccade.tasks.load import describe_model
from tests.contract.names import IMAGE_MODELS, NANOS, VIDEO_MODELS, VIDEO_NANOS

pytest.importorskip("onnx", reason="needs saccade[export]")
pytest.importorskip("onnxscript", reason="needs saccade[export]")
pytest.importorskip("onnxruntime", reason="needs saccade[export]")

SEGMENTER, DETECTOR = "paca_nano+paca", "sparseformer_nano+sparse"
SMALL = [*NANOS, *VIDEO_NANOS, SEGMENTER, DETECTOR]
LARGE = [name for name in IMAGE_MODELS + VIDEO_MODELS if name not in SMALL]
SIZES = [(64, 64), (80, 112), (75, 51)]  # the example has 64 x 96


def build(name: str) -> nn.Module:
    """A model whose zero-initialised layers are randomised, so that regions move and every layer counts."""
    torch.manual_seed(0)
    backbone, _, head = name.partition("+")
    if head == "sparse":
        model = saccade.create_detector(backbone, head, 5, min_size=96, max_size=160)
    elif head:
        model = saccade.create_segmenter(backbone, head, 5)
    else:
        model = timm.create_model(name, num_classes=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export a model to ONNX once: name -> model, card, Export."""
    cache = {}

    def get(name):
        if name not in cache:
            model = build(name)
            card = describe_model(model)
            path = tmp_path_factory.mktemp("onnx") / f"{name}.onnx"
            cache[name] = model, card, export_model(model, path, card=card)
        return cache[name]

    return get


def test_every_registered_model_is_exported_in_one_of_the_tiers():
    assert len(SMALL) == 7
    assert sorted({*SMALL, *LARGE} - {SEGMENTER, DETECTOR}) == saccade.list_models()


TASK_MODELS = [pytest.param(name, marks=pytest.mark.slow) for name in (SEGMENTER, DETECTOR)]


@pytest.mark.parametrize("name", [*NANOS, *VIDEO_NANOS, *TASK_MODELS])
def test_onnx_file_agrees_at_three_sizes_and_batch_sizes(exported, name):
    model, card, export = exported(name)
    rows = check_export(export.path, model, card, export.metadata, sizes=SIZES)
    shapes = {(row.batch, row.height, row.width) for row in rows if row.inputs == "images"}
    assert shapes == {(batch, *size) for batch in (1, 3, 4) for size in SIZES}
    assert sum(row.inputs == "photographs" for row in rows) == (0 if name in VIDEO_NANOS else 8)
    assert max(row.relative for row in rows) < 1e-4  # the promise is 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_onnx_file_of_a_large_variant_agrees(tmp_path, name):
    model = build(name)
    card = describe_model(model)
    export = export_model(model, tmp_path / "model.onnx", card=card)
    rows = check_export(export.path, model, card, export.metadata, sizes=SIZES)
    worst = max(row.relative for row in rows)
    print(f"{name}: {export.bytes / 1e6:.0f} MB, {worst:.1e}")  # shown by -rP
    assert worst < TOLERANCE["float32"]


@pytest.mark.parametrize("name", SMALL)
def test_onnx_file_names_dynamic_axes_and_has_onnx_operators_only(exported, name):
    import onnx

    _, card, export = exported(name)
    proto = onnx.load(export.path)
    onnx.checker.check_model(proto)
    dims = [dim.dim_param or dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    frames = [8] if name in VIDEO_NANOS else []
    assert dims == ["batch", 3, *frames, "height", "width"] == export.metadata["input"]
    assert {entry.domain for entry in proto.opset_import} <= {"", "ai.onnx"}
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    assert [output.name for output in proto.graph.output] == export.metadata["outputs"]
    (entry,) = [entry for entry in proto.metadata_props if entry.key == "saccade"]
    assert json.loads(entry.value) == json.loads(json.dumps(export.metadata))
    assert export.metadata["preprocess"]["mean"] == pytest.approx(card.preprocess.mean)
    assert len(export.metadata["classes"]) == card.num_classes


@pytest.mark.parametrize(
    "name",
    [
        "vt_nano",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("svit_nano", "paca_nano", "sparseformer_nano")),
        TASK_MODELS[0],
    ],
)
def test_pt2_file_agrees_after_loading(tmp_path, name):
    model = build(name)
    card = describe_model(model)
    export = export_model(model, tmp_path / "model.pt2", "pt2", card=card)
    files = {"saccade.json": ""}
    program = torch.export.load(export.path, extra_files=files)
    assert custom_operators(program) == []
    assert json.loads(files["saccade.json"])["task"] == card.task
    rows = check_export(export.path, model, card, export.metadata, sizes=SIZES)
    assert len(rows) == 9
    assert max(row.relative for row in rows) < 1e-5


def test_custom_operator_in_the_graph_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "custom_operators", lambda program: ["saccade.sample.default"])
    with pytest.raises(ExportError, match=r"ATen operators only, got saccade\.sample"):
        export_model(build("vt_nano"), tmp_path / "model.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


def test_custom_operators_are_found_in_a_graph():
    @torch.library.custom_op("saccade::probe_for_export", mutates_args=())
    def probe(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    probe.register_fake(torch.empty_like)

    class Model(nn.Module):
        def forward(self, x):
            return probe(x) * 2

    program = torch.export.export(Model(), (torch.zeros(2),))
    assert custom_operators(program) == ["saccade.probe_for_export.default"]


def test_fixed_axes_are_fixed(tmp_path):
    model = build("vt_nano")
    card = describe_model(model)
    export = export_model(model, tmp_path / "model.onnx", dynamic=(), card=card, size=96)
    assert export.metadata["input"] == [1, 3, 96, 96]
    (row,) = check_export(export.path, model, card, export.metadata)
    assert (row.batch, row.height, row.width) == (1, 96, 96)
    assert row.relative < 1e-4
    with pytest.raises(ValueError, match=r"expected images of shape \(1, 3, 96, 96\), got \(2, 3, 96, 96\)"):
        OnnxModel(export.path)(np.zeros((2, 3, 96, 96), np.float32))


def test_float16_file_is_half_as_large_and_close(exported, tmp_path):
    model, card, full = exported("vt_nano")
    export = export_model(model, tmp_path / "half.onnx", dtype=torch.float16, card=card)
    assert export.bytes < 0.6 * full.bytes
    rows = check_export(export.path, model, card, export.metadata, sizes=SIZES)
    assert 1e-6 < max(row.relative for row in rows) < TOLERANCE["float16"]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(300, 451), (64, 64), (40, 33), (127, 500)])
def test_resize_in_the_graph_equals_pillow(interpolation, size):
    """Pillow rounds its weights to 22 bits: values differ by one level, rarely."""
    photo = Image.open(photo_paths()["cat"]).convert("RGB").resize(size[::-1])
    pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None]
    actual = ResizeAndCrop(64, 71, interpolation)(pixels)
    expected = eval_transform(64, 64 / 71, interpolation)(photo)[None].float()
    difference = (actual - expected).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 2e-3


def test_graph_with_preprocessing_takes_uint8_photographs(tmp_path):
    model = build("vt_nano")
    card = describe_model(model)._replace(preprocess=Preprocess(64, crop_pct=0.9))
    export = export_model(model, tmp_path / "model.onnx", with_preprocessing=True, card=card)
    runner = OnnxModel(export.path)
    assert runner.session.get_inputs()[0].type == "tensor(uint8)"
    rows = check_export(export.path, model, card, export.metadata, sizes=[(90, 70), (64, 64), (120, 201)])
    assert len(rows) == 9 + 8
    assert max(row.relative for row in rows) < 2e-3  # single pixels differ by one level


def test_preprocessing_of_unknown_output_size_is_refused(tmp_path):
    with pytest.raises(ExportError, match="depends on the image"):
        export_model(build(DETECTOR), tmp_path / "model.onnx", with_preprocessing=True)
    card = describe_model(build("vt_nano"))
    card = card._replace(preprocess=card.preprocess._replace(interpolation="lanczos"))
    with pytest.raises(ExportError, match="bilinear or bicubic and crop_pct <= 1, got lanczos"):
        export_model(build("vt_nano"), tmp_path / "model.onnx", with_preprocessing=True, card=card)
    assert list(tmp_path.iterdir()) == []


def test_normalize_images_equals_the_batch_transform():
    from saccade.data.transforms.batch import normalize

    for shape, frames in (((2, 3, 5, 7), 0), ((2, 3, 4, 5, 7), 4)):
        preprocess = Preprocess(frames=frames)
        images = torch.randint(256, shape, dtype=torch.uint8)
        expected = normalize(images / 255, preprocess.mean, preprocess.std)
        torch.testing.assert_close(NormalizeImages(preprocess)(images), expected)


def test_detector_graph_equals_the_detector():
    """Padding, extent, scores and boxes; the detector also sorts and drops small boxes."""
    model = build(DETECTOR)
    images = torch.rand(2, 3, 96, 130)  # shorter side 96: not resized, padded to 96 x 160
    with torch.no_grad():
        expected = model(list(images))
        boxes, labels, scores = DetectorGraph(model)(
            torch.stack([model.transform.normalize(image) for image in images])
        )
    for i, prediction in enumerate(expected):
        order = scores[i].argsort(descending=True)
        sides = (boxes[i, order, 2:] - boxes[i, order, :2]).min(-1).values
        order = order[sides >= 1e-2]
        torch.testing.assert_close(scores[i, order], prediction["scores"])
        torch.testing.assert_close(boxes[i, order], prediction["boxes"], atol=1e-3, rtol=1e-4)
        assert torch.equal(labels[i, order], prediction["labels"])


def test_adaptive_pooling_of_dynamic_size_is_refused_in_onnx(tmp_path):
    class Pool(nn.Module):
        num_classes = 12

        def forward(self, images):
            return nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)

    with pytest.raises(ExportError, match="pools to a grid of 2 x 2"):
        export_model(Pool(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
    export_model(Pool(), tmp_path / "model.onnx", dynamic=("batch",), size=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "tflite"}, "expected format onnx or pt2, got 'tflite'"),
        ({"dynamic": ("batch", "depth")}, "got depth"),
        ({"dtype": torch.int8, "format": "pt2"}, "int8 weights are for onnx files, got format pt2"),
        ({"dtype": torch.bfloat16}, "expected dtype float32 or float16 or int8, got bfloat16"),
    ],
)
def test_unsupported_option_is_refused(tmp_path, options, message):
    with pytest.raises(ExportError, match=message):
        export_model(build("vt_nano"), tmp_path / "model.onnx", **options)


def test_failed_export_leaves_nothing_and_keeps_the_old_file(tmp_path):
    class Branch(nn.Module):
        num_classes = 3

        def forward(self, images):
            return images.mean((1, 2, 3))[:, None] if images.sum() > 0 else images.amax((1, 2, 3))[:, None]

    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(ExportError, match=r"^torch.export cannot export this model: ") as error:
        export_model(Branch(), path)
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == b"old"


def test_export_leaves_the_model_as_it_was(tmp_path):
    model = build("vt_nano").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export_model(model, tmp_path / "model.pt2", "pt2", dtype=torch.float16)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_check_sizes_are_three_different_shapes():
    assert check_sizes(128) == [(128, 128), (128, 96), (131, 161)]


def test_check_finds_a_file_of_other_weights(exported):
    _, card, export = exported("vt_nano")
    torch.manual_seed(1)
    other = timm.create_model("vt_nano", num_classes=7).eval()
    rows = check_export(export.path, other, card, export.metadata, batches=(1,), sizes=[(64, 64)])
    assert max(row.relative for row in rows) > TOLERANCE["float16"]


@pytest.mark.parametrize("name", ["vt_nano", pytest.param("sparseformer_nano", marks=pytest.mark.slow)])
def test_int8_file_is_smaller_and_dequantizes_to_rounded_weights(exported, tmp_path, name):
    import onnx

    model, card, export = exported(name)
    small = export_model(model, tmp_path / "int8.onnx", dtype=torch.int8, card=card)
    assert small.metadata["dtype"] == "int8"
    before, after = onnx.load(export.path), onnx.load(small.path)
    onnx.checker.check_model(after)
    assert {entry.domain for entry in after.opset_import} <= {"", "ai.onnx"}
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in before.graph.initializer}
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    quantized = [node for node in after.graph.node if node.op_type == "DequantizeLinear"]
    assert sum(stored[node.input[0]].size for node in quantized) > 0.8 * sum(
        values.size for values in weights.values() if values.dtype == np.float32
    )
    for node in quantized:
        values, scale = stored[node.input[0]], stored[node.input[1]]
        assert values.dtype == np.int8
        shape = [1] * values.ndim
        shape[node.attribute[0].i] = -1
        error = np.abs(values * scale.reshape(shape) - weights[node.output[0]])
        assert (error <= 0.5001 * scale.reshape(shape)).all()
    rows = check_export(small.path, model, card, small.metadata, batches=(1, 3), sizes=[(64, 64), (75, 51)])
    assert 1e-4 < max(row.relative for row in rows) < TOLERANCE["int8"]
