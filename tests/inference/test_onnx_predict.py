"""Preprocessing without torch against that of the PyTorch path, pixel by pixel, and predictions from a file."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from saccade.data.decode.image import read_image
from saccade.data.synthetic.photos import photo_paths
from saccade.data.transforms.image import eval_transform
from saccade.inference.export import export_model
from saccade.inference.export_check import torch_inputs
from saccade.inference.onnx_predict import OnnxModel, centre_crop, class_areas, resize, softmax, to_array
from saccade.models.card import Preprocess
from saccade.tasks.load import describe_model
from saccade.tasks.segmentation_drawing import class_areas as torch_class_areas
from tests.inference.test_export import DETECTOR, SEGMENTER, build

pytest.importorskip("onnx", reason="needs saccade[export]")
pytest.importorskip("onnxscript", reason="needs saccade[export]")
pytest.importorskip("onnxruntime", reason="needs saccade[export]")

PHOTO = photo_paths()["cat"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Name -> model, card, session of a classifier, a segmenter and a detector."""
    folder, opened = tmp_path_factory.mktemp("onnx"), {}
    for name in ("vt_nano", SEGMENTER, DETECTOR):
        model = build(name)
        card = describe_model(model)._replace(shorter=90 if name == SEGMENTER else None)
        if name == "vt_nano":
            card = card._replace(preprocess=Preprocess(64, crop_pct=0.875))
        export = export_model(model, folder / f"{name}.onnx", card=card)
        opened[name] = model, card, OnnxModel(export.path, threads=1)
    return opened


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875])
@pytest.mark.parametrize("size", [(640, 427), (427, 640), (72, 72), (30, 41)])
def test_centre_crop_equals_timm(interpolation, crop_pct, size):
    photo = Image.open(PHOTO).convert("RGB").resize(size)
    metadata = {"size": 64, "shorter": int(64 / crop_pct), "crop_pct": crop_pct, "interpolation": interpolation}
    for side in (None, 48):
        expected = eval_transform(side or 64, crop_pct, interpolation)(photo).numpy()
        assert np.array_equal(to_array(centre_crop(photo, metadata, side)), expected)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(20, 31), (50, 70), (37, 41), (37, 90)])
def test_resize_equals_interpolate(antialias, size):
    pixels = torch.rand(2, 3, 37, 41, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(pixels, size, mode="bilinear", antialias=antialias, align_corners=False)
    np.testing.assert_allclose(resize(pixels.numpy(), *size, antialias=antialias), expected.numpy(), atol=2e-6)


@pytest.mark.parametrize("name", ["vt_nano", SEGMENTER, DETECTOR])
@pytest.mark.parametrize("photo", ["cat", "rocket", "camera"])
def test_preprocess_equals_the_pytorch_path(files, name, photo):
    model, card, session = files[name]
    image = read_image(photo_paths()[photo])
    expected = torch_inputs(image, model, card).numpy()
    actual = session.preprocess(image)
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_classify_has_the_probabilities_of_the_model(files):
    model, card, session = files["vt_nano"]
    image = read_image(PHOTO)
    with torch.no_grad():
        expected = model(torch_inputs(image, model, card))[0].softmax(0)
    classes = session.classify(image, top=3)["classes"]
    assert [entry["class"] for entry in classes] == expected.topk(3).indices.tolist()
    assert [entry["probability"] for entry in classes] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)
    assert classes[0]["name"] == card.names[classes[0]["class"]]


def test_segment_has_the_labels_of_the_model(files):
    model, card, session = files[SEGMENTER]
    image = read_image(PHOTO)
    with torch.no_grad():
        probabilities = model(torch_inputs(image, model, card)).softmax(1)
        expected = F.interpolate(probabilities, image.size[::-1], mode="bilinear").argmax(1)[0].numpy()
    labels = session.segment(image)
    assert labels.shape == (image.height, image.width)
    assert (labels == expected).mean() > 0.999
    assert class_areas(labels, card.names) == torch_class_areas(labels, card.names)


def test_detect_has_the_objects_of_the_detector(files):
    model, _, session = files[DETECTOR]
    image = read_image(PHOTO)
    with torch.no_grad():
        expected = model([torch.from_numpy(to_array(image)).float() / 255])[0]
    threshold = float(expected["scores"][10])
    objects = session.detect(image, threshold=threshold - 1e-6)
    assert len(objects) >= 11
    for entry, box, label, score in zip(
        objects, expected["boxes"], expected["labels"], expected["scores"], strict=False
    ):
        assert entry["score"] == pytest.approx(float(score), abs=1e-5)
        assert entry["label"] == int(label)
        assert entry["box"] == pytest.approx(box.tolist(), abs=0.05)


def test_softmax_equals_torch():
    logits = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32) * 20
    np.testing.assert_allclose(softmax(logits, 1), torch.from_numpy(logits).softmax(1).numpy(), atol=1e-6)


def test_files_without_metadata_are_refused(tmp_path):
    import onnx
    from onnx import helper

    value = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1])
    output = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["out"])], "g", [value], [output])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.raises(ValueError, match="no metadata of saccade"):
        OnnxModel(tmp_path / "other.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ValueError, match="not a readable ONNX file"):
        OnnxModel(tmp_path / "text.onnx")
    with pytest.raises(ValueError, match="no such file"):
        OnnxModel(tmp_path / "missing.onnx")
