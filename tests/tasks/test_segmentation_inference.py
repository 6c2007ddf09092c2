"""Sliding window, multi-scale and flip, with functions whose output is known."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade.tasks.segmentation_inference import (
    MULTI_SCALE_FLIP,
    WHOLE_IMAGE,
    InferenceOptions,
    predict_labels,
    predict_probabilities,
    slide_window,
    window_bands,
    window_spans,
    window_weights,
)


def local_head(radius):
    """A convolution: translation-invariant, with a receptive field of `radius`."""
    weight = torch.randn(5, 3, 2 * radius + 1, 2 * radius + 1, generator=torch.Generator().manual_seed(radius))
    return lambda images: F.conv2d(images, weight, padding=radius)


@pytest.mark.parametrize(("height", "width"), [(150, 201), (96, 96), (97, 333), (40, 160), (64, 31)])
def test_sliding_window_equals_the_whole_image(height, width):
    images, head = torch.randn(2, 3, height, width), local_head(4)
    torch.testing.assert_close(slide_window(head, images, 96, 64, margin=4), head(images), rtol=1e-4, atol=1e-4)


def test_windows_start_on_the_grid_of_strides():
    """So that a strided network sees the same cells in every window."""

    def strided(images):
        coarse = F.avg_pool2d(images, 32, ceil_mode=True).repeat_interleave(32, 2).repeat_interleave(32, 3)
        return coarse[:, :, : images.shape[2], : images.shape[3]]

    images = torch.randn(1, 3, 250, 330)
    torch.testing.assert_close(slide_window(strided, images, 128, 64, margin=0), strided(images))


def test_windows_are_blended_without_steps():
    """Logits that depend on the position in the window: the blend has no step where a window ends."""

    def position(images):
        height, width = images.shape[2:]
        ramp = torch.linspace(-1, 1, width).expand(images.shape[0], 1, height, width)
        return torch.cat([ramp, -ramp], 1)

    blended = slide_window(position, torch.zeros(1, 3, 64, 400), 128, 64)
    steps = (blended[:, :, :, 1:] - blended[:, :, :, :-1]).abs().max()
    assert steps < 0.15  # without blending a window's end is a step of 2


@given(st.integers(1, 2000), st.integers(32, 600), st.floats(0.2, 1))
@settings(max_examples=200, deadline=None)
def test_windows_cover_every_pixel(length, window, fraction):
    stride = max(1, int(window * fraction))
    margin = (window - stride) // 4
    weight = torch.zeros(length)
    for start, end in window_spans(length, window, stride):
        assert end - start <= window
        weight[start:end] += window_weights(start, end, length, window - stride, margin, torch.device("cpu"))
    assert weight.min() > 0


def test_weights_of_two_windows_sum_to_one():
    left, right = (
        window_weights(0, 96, 160, 32, 4, torch.device("cpu")),
        window_weights(64, 160, 160, 32, 4, torch.device("cpu")),
    )
    torch.testing.assert_close(left[64:] + right[:32], torch.ones(32))
    assert left[-4:].max() == 0


def test_views_are_mapped_back_to_the_image():
    """Class 1 is bright: every view must agree where."""
    images = torch.zeros(1, 3, 64, 96)
    images[:, :, 16:40, 8:40] = 1

    def bright(view):
        level = 20 * (view.mean(1, keepdim=True) - 0.5)
        return torch.cat([-level, level], 1)

    for options in (
        WHOLE_IMAGE,
        MULTI_SCALE_FLIP,
        InferenceOptions(flip=True),
        InferenceOptions(window=48, scales=(0.75, 1.5), flip=True),
    ):
        probabilities = predict_probabilities(bright, images, options)
        torch.testing.assert_close(probabilities.sum(1), torch.ones(1, 64, 96))
        labels = probabilities.argmax(1)[0]
        assert labels[18:38, 10:38].all()
        assert not labels[:14].any()
        assert not labels[:, 42:].any()


@pytest.mark.shows("SVIT-53")
def test_probabilities_are_averaged_over_views():
    views = []

    def once(view):
        views.append(view)
        return torch.stack([torch.zeros(1, 32, 32), torch.full((1, 32, 32), float(len(views)))], 1)

    probabilities = predict_probabilities(once, torch.randn(1, 3, 32, 32), InferenceOptions(flip=True))
    assert probabilities[0, 1, 0, 0].item() == pytest.approx((torch.tensor([1.0, 2.0]).sigmoid().mean()).item())
    torch.testing.assert_close(views[1], views[0].flip(3))


def test_bands_concatenate_to_the_whole_image():
    """Rows are returned as soon as no later window changes them."""
    images, head = torch.randn(1, 3, 300, 110), local_head(2)
    bands = list(window_bands(head, images, 96, 32))  # three windows per row
    assert sum(band.shape[2] for band in bands) == 300
    assert max(band.shape[2] for band in bands) <= 96
    torch.testing.assert_close(torch.cat(bands, 2), head(images), rtol=1e-4, atol=1e-4)
    expected = head(images).argmax(1)
    for options in (InferenceOptions(window=96), WHOLE_IMAGE):
        assert (predict_labels(head, images, options) == expected).float().mean() > 0.999


def test_mirrored_classes_are_swapped_back():

    def sides(view):
        bright = view.mean(1, keepdim=True)
        return torch.cat([20 * (0.5 - bright), 20 * (bright - 0.5)], 1)

    images = torch.zeros(1, 3, 32, 64)
    assert predict_probabilities(sides, images, InferenceOptions(flip=True))[:, 0].min() > 0.99
    swapped = predict_probabilities(sides, images, InferenceOptions(flip=True), flipped_classes=[1, 0])
    torch.testing.assert_close(swapped, torch.full_like(swapped, 0.5), atol=1e-3, rtol=0)


def test_wrong_options_are_named():
    images = torch.zeros(1, 3, 64, 64)
    with pytest.raises(ValueError, match="at least 32 px"):
        slide_window(local_head(1), images, 16)
    with pytest.raises(ValueError, match=r"margin \(20\) must not exceed half the overlap of the windows \(32 px\)"):
        slide_window(local_head(1), images, 64, 32, margin=20)
    with pytest.raises(ValueError, match="expected at least one scale"):
        predict_probabilities(local_head(1), images, InferenceOptions(scales=()))


def test_segmenter_accepts_any_image_size():
    model = saccade.create_segmenter("svit_nano", "fpn", 4, head_kwargs={"dim": 32, "branch_dim": 16}).eval()
    with torch.no_grad():
        images = torch.randn(1, 3, 70, 203)
        probabilities = predict_probabilities(model, images, InferenceOptions(window=64))
        alone = predict_probabilities(model, images[:, :, :64, :64])
        one_window = predict_probabilities(model, images[:, :, :64, :64], InferenceOptions(window=64))
    assert probabilities.shape == (1, 4, 70, 203)
    torch.testing.assert_close(alone, one_window)


@pytest.mark.shows("SVIT-53")
def test_multi_scale_options_are_swins():
    assert MULTI_SCALE_FLIP == (0, 0, (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), True)


def test_default_stride_is_two_thirds_of_the_window_on_the_grid():
    widths = []

    def spy(crops):
        widths.append(tuple(crops.shape[2:]))
        return crops[:, :2]

    slide_window(spy, torch.zeros(1, 3, 96, 224), 96, batch=1)
    assert widths == [(96, 96)] * 3  # starts at 0, 64, 128
    assert window_spans(224, 96, 64) == [(0, 96), (64, 160), (128, 224)]
    assert window_spans(230, 96, 64) == [(0, 96), (64, 160), (128, 224), (160, 230)]
