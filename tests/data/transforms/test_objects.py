"""Augmentation of an image with its objects: boxes and masks follow the pixels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

from saccade.data.loader import seed_all
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects
from saccade.data.transforms.objects import (
    EvalObjects,
    TrainObjects,
    detr_crop_window,
    drop_cropped_objects,
    pack_masks,
    tight_boxes,
    unpack_masks,
)

COLOURS = [(200, 0, 0), (0, 200, 0)]


def two_rectangles() -> tuple[Image.Image, Objects]:
    """A red and a green rectangle on black."""
    canvas = np.zeros((60, 90, 3), np.uint8)
    boxes = np.array([[10, 5, 40, 35], [50, 20, 80, 55]], np.float32)
    masks = np.zeros((2, 60, 90), np.uint8)
    for mask, colour, (x0, y0, x1, y1) in zip(masks, COLOURS, boxes.astype(int), strict=True):
        canvas[y0:y1, x0:x1] = colour
        mask[y0:y1, x0:x1] = 1
    return Image.fromarray(canvas), Objects(boxes, np.array([1, 2]), masks, np.zeros(2, bool), np.array([1, 2]))


def visible(pixels: torch.Tensor, label: int) -> torch.Tensor:
    """Pixels with the colour of object `label`."""
    return pixels[label - 1] > 100


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), crop=st.sampled_from(["none", "resized", "detr"]))
def test_boxes_and_masks_follow_their_pixels(seed, crop):
    image, objects = two_rectangles()
    seed_all(seed)
    pixels, target = TrainObjects(72, crop, (0.8, 2.0), vertical_flip=0.5)(image, objects)
    assert pixels.dtype == torch.uint8
    for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
        coloured = visible(pixels, int(label))
        perimeter = 2 * float((box[2:] - box[:2]).sum())
        assert (coloured ^ (mask > 0)).sum() <= 0.5 * perimeter  # interpolation: less than half a pixel
        assert (tight_boxes(coloured[None])[0] - box).abs().max() <= 1.5
    for label in {1, 2} - set(target["labels"].tolist()):
        remainder = tight_boxes(visible(pixels, label)[None])[0]
        assert (remainder[2:] - remainder[:2]).min() <= 4, "dropped objects are outside, except for a line"


def test_flips_are_exact():
    image, objects = two_rectangles()
    original, unchanged = EvalObjects()(image, objects)
    assert unchanged["boxes"].tolist() == objects.boxes.tolist()
    pixels, target = TrainObjects(flip=1.0)(image, objects)
    assert target["boxes"].tolist() == [[50, 5, 80, 35], [10, 20, 40, 55]]
    assert torch.equal(visible(pixels, 1), target["masks"][0] > 0)
    assert torch.equal(pixels, original.flip(-1))
    pixels, target = TrainObjects(flip=0.0, vertical_flip=1.0)(image, objects)
    assert target["boxes"].tolist() == [[10, 25, 40, 55], [50, 5, 80, 40]]
    assert torch.equal(pixels, original.flip(-2))


def test_resized_crop_reaches_all_scales_and_is_at_most_size():
    image, objects = two_rectangles()
    heights, sizes = [], []
    for seed in range(60):
        seed_all(seed)
        pixels, target = TrainObjects(64, "resized", (0.5, 2.0))(image, objects)
        sizes.append(tuple(pixels.shape[-2:]))
        heights += (target["boxes"][:, 3] - target["boxes"][:, 1]).tolist()
    assert max(max(size) for size in sizes) == 64
    assert 32 <= min(max(size) for size in sizes) <= 36  # at scale 0.5 the longer side is 32 px
    unscaled = 35 * 64 / 90  # height of the taller rectangle at scale 1
    assert 1.5 * unscaled < max(heights) <= 2.1 * unscaled
    assert (64, 64) in sizes, "at scale 2 the image is larger than the window"


@pytest.mark.shows("PACA-61")
def test_detr_crop_keeps_half_of_the_images_whole():
    image, objects = two_rectangles()
    sizes = []
    for seed in range(200):
        seed_all(seed)
        sizes.append(tuple(TrainObjects(crop="detr")(image, objects)[0].shape[-2:]))
    cropped = [size for size in sizes if size != (60, 90)]
    assert 60 < len(cropped) <= 120  # half, less the windows that cover the whole image


@pytest.mark.shows("PACA-61")
def test_detr_crop_window_is_384_to_600_px_of_the_resized_image():
    heights = set()
    for seed in range(3000):
        seed_all(seed)
        top, left, height, width = detr_crop_window(6000, 9000)
        assert top + height <= 6000
        assert left + width <= 9000
        heights.add(height)
    assert min(heights) == pytest.approx(384 * 10, abs=40)  # at 600 px, factor 10
    assert max(heights) == 6000  # 600 px at 400 px is more than the image


def test_jitter_changes_only_colours():
    image, objects = two_rectangles()
    seed_all(0)
    pixels, target = TrainObjects(flip=0.0, jitter=0.5)(image, objects)
    original, unchanged = EvalObjects()(image, objects)
    assert not torch.equal(pixels, original)
    assert all(torch.equal(target[key], unchanged[key]) for key in ("boxes", "labels", "masks"))


def test_tight_boxes_enclose_the_pixels_of_each_mask():
    masks = torch.zeros(3, 10, 12, dtype=torch.uint8)
    masks[0, 2:5, 3:9] = 1
    masks[1, 9, 11] = 1
    assert tight_boxes(masks).tolist() == [[3, 2, 9, 5], [11, 9, 12, 10], [0, 0, 0, 0]]


def test_drop_cropped_objects_tightens_boxes_and_drops_small_objects():
    masks = torch.zeros(3, 10, 10, dtype=torch.uint8)
    masks[0, 2:5, 3:9] = 1
    masks[1, 0, 0:3] = 1  # a line of 1 px
    target = {
        "boxes": tv_tensors.BoundingBoxes(torch.zeros(3, 4), format="XYXY", canvas_size=(10, 10)),
        "labels": torch.tensor([1, 2, 3]),
        "masks": tv_tensors.Mask(masks),
    }
    remaining = drop_cropped_objects(target)
    assert remaining["labels"].tolist() == [1]
    assert remaining["boxes"].tolist() == [[3, 2, 9, 5]]
    assert isinstance(remaining["masks"], tv_tensors.Mask)
    assert isinstance(remaining["boxes"], tv_tensors.BoundingBoxes)


def test_invalid_crops_raise():
    with pytest.raises(DataError, match=r"expected augment\.crop to be none, resized, detr for detection, got 'pad'"):
        TrainObjects(crop="pad")
    with pytest.raises(DataError, match=r"Set data.image_size"):
        TrainObjects(crop="resized")


@pytest.mark.parametrize("width", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_packed_masks_take_one_bit_per_pixel_and_unpack_exactly(count, width):
    masks = torch.randint(2, (count, 5, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    packed = pack_masks(masks)
    assert packed.shape == (count, 5, -(-width // 8))
    assert torch.equal(unpack_masks(packed, width), masks)
