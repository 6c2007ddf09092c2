"""`explain_func` in Quantus's metrics."""

import numpy as np
import pytest
import quantus
import torch

import saccade
from saccade.data.decode.image import read_image
from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.adapters import explain_func
from tests.explanation.models import QuadrantModel

FAMILIES = ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"]


@pytest.mark.parametrize("method", ["gradient", "occlusion"])
def test_heat_map_covers_the_only_quadrant_the_model_reads(method):
    images = torch.rand(3, 3, 64, 64)
    maps = explain_func(QuadrantModel(), images.numpy(), np.array([0, 1, 0]), method=method)
    assert maps.shape == (3, 1, 64, 64)
    assert maps.dtype == np.float32
    brightness = images[:, :, :32, :32].mean((1, 2, 3)).numpy()
    np.testing.assert_allclose(maps.sum((1, 2, 3)), brightness * [1, -1, 1], rtol=1e-4)
    assert np.abs(maps[:, 0, 34:, 34:]).max() == 0
    assert np.abs(maps[:, 0, :30, :30]).min() > 0


def test_quantus_finds_the_quadrant_by_pixel_flipping_and_relevance_rank():
    """The class score falls when the explained quadrant is removed, and all of its mass lies there."""
    images, classes = np.random.default_rng(0).random((2, 3, 64, 64), np.float32), np.zeros(2, int)
    mask = np.zeros((2, 1, 64, 64), bool)
    mask[:, :, :32, :32] = True
    common = dict(model=QuadrantModel().eval(), x_batch=images, y_batch=classes, explain_func=explain_func)
    # The maps are resampled linearly, so a border of half a map cell lies outside.
    assert np.min(quantus.RelevanceMassAccuracy(disable_warnings=True)(**common, s_batch=mask)) > 0.95
    flipping = quantus.PixelFlipping(
        features_in_step=1024, perturb_baseline="black", return_auc_per_sample=False, disable_warnings=True
    )
    curves = np.array(flipping(**common, softmax=False))
    assert curves.shape == (2, 12)  # 3 channels of 4096 pixels
    assert (curves[:, 0] > 3.2).all()
    np.testing.assert_allclose(curves[:, 2:], 3, atol=1e-3)  # the logit of a black quadrant, after a quarter is flipped


@pytest.mark.parametrize("name", FAMILIES)
def test_quantus_evaluates_every_family(name):
    model = saccade.load(f"{name}.tiny_imagenet").eval()
    photos = [read_image(photo_paths()[photo]).resize((64, 64)) for photo in ("cat", "coffee")]
    images = np.stack([(np.array(photo, np.float32) / 255 - 0.45) / 0.225 for photo in photos]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        classes = model(torch.from_numpy(images)).argmax(1).numpy()
    metric = quantus.MaxSensitivity(nr_samples=2, lower_bound=0.02, disable_warnings=True)
    scores = metric(model=model, x_batch=images, y_batch=classes, explain_func=explain_func)
    assert len(scores) == 2
    assert np.isfinite(scores).all()
    alone = [explain_func(model, images[i : i + 1], classes[i : i + 1])[0] for i in range(2)]
    np.testing.assert_allclose(explain_func(model, images, classes), alone, rtol=1e-3, atol=1e-7)


def test_explain_func_refuses_wrong_arguments():
    model, images = QuadrantModel(), np.zeros((2, 3, 64, 64), np.float32)
    with pytest.raises(ValueError, match="expected method of gradient, occlusion"):
        explain_func(model, images, [0, 0], method="GradientShap")
    with pytest.raises(ValueError, match="B classes, got"):
        explain_func(model, images, [0])
    with pytest.raises(ValueError, match="expected classes below 2, got 7"):
        explain_func(model, images, [0, 7])
    with pytest.raises(ValueError, match="expected a step from -1 to 0, got 1"):
        explain_func(model, images, [0, 0], step=1)
