"""What moves a pixel moves its box and its mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

from saccade.data.loader import ObjectEvalLoader, ObjectLoader, Order, seed_all
from saccade.data.open import open_train_and_val_objects
from saccade.data.sources.base import DataError
from saccade.data.sources.objects import Objects, trainable_objects
from saccade.data.synthetic.scenes import SceneObjects
from saccade.data.transforms.objects import (
    EvalObjects,
    TrainObjects,
    drop_cropped_objects,
    pack_masks,
    tight_boxes,
    unpack_masks,
)
from tests.data.coco_files import write

COLOURS = [(200, 0, 0), (0, 200, 0)]


def planted() -> tuple[Image.Image, Objects]:
    """A red and a green rectangle on black."""
    canvas = np.zeros((60, 90, 3), np.uint8)
    boxes = np.array([[10, 5, 40, 35], [50, 20, 80, 55]], np.float32)
    masks = np.zeros((2, 60, 90), np.uint8)
    for mask, colour, (x0, y0, x1, y1) in zip(masks, COLOURS, boxes.astype(int), strict=True):
        canvas[y0:y1, x0:x1] = colour
        mask[y0:y1, x0:x1] = 1
    return Image.fromarray(canvas), Objects(boxes, np.array([1, 2]), masks, np.zeros(2, bool), np.array([1, 2]))


def visible(picture: torch.Tensor, label: int) -> torch.Tensor:
    """Where the colour of object `label` is."""
    return picture[label - 1] > 100


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), crop=st.sampled_from(["none", "resized", "detr"]))
def test_boxes_and_masks_stay_on_their_pixels(seed, crop):
    image, objects = planted()
    seed_all(seed)
    picture, target = TrainObjects(72, crop, (0.8, 2.0), vertical_flip=0.5)(image, objects)
    assert picture.dtype == torch.uint8
    for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
        seen = visible(picture, int(label))
        edge = 2 * float((box[2:] - box[:2]).sum())
        assert (seen ^ (mask > 0)).sum() <= 0.5 * edge  # of interpolation: less than half a pixel all around
        around = tight_boxes(seen[None])[0]
        assert (around - box).abs().max() <= 1.5
    for label in {1, 2} - set(target["labels"].tolist()):
        left = tight_boxes(visible(picture, label)[None])[0]
        assert (left[2:] - left[:2]).min() <= 4  # what was dropped was cut away, but for a line


def test_a_flip_is_exact():
    image, objects = planted()
    picture, target = TrainObjects(flip=1.0)(image, objects)
    assert target["boxes"].tolist() == [[50, 5, 80, 35], [10, 20, 40, 55]]
    assert torch.equal(visible(picture, 1), target["masks"][0] > 0)
    straight, kept = EvalObjects()(image, objects)
    assert torch.equal(picture, straight.flip(-1))
    assert kept["boxes"].tolist() == objects.boxes.tolist()


def test_resized_windows_are_at_most_as_large_as_asked_and_reach_the_asked_scales():
    image, objects = planted()
    heights, sizes = [], []
    for seed in range(60):
        seed_all(seed)
        picture, target = TrainObjects(64, "resized", (0.5, 2.0))(image, objects)
        sizes.append(tuple(picture.shape[-2:]))
        heights += (target["boxes"][:, 3] - target["boxes"][:, 1]).tolist()
    assert max(max(size) for size in sizes) == 64
    assert 30 <= min(max(size) for size in sizes) <= 36  # the longer side at half of 64 px
    whole = 35 * 64 / 90  # the taller rectangle where the longer side is 64 px
    assert 1.5 * whole < max(heights) <= 2.1 * whole
    assert any(size == (64, 64) for size in sizes)  # at twice the size there is enough for a whole window


def test_detrs_window_keeps_every_second_picture_and_cuts_from_the_others():
    image, objects = planted()
    sizes = []
    for seed in range(60):
        seed_all(seed)
        sizes.append(tuple(TrainObjects(crop="detr")(image, objects)[0].shape[-2:]))
    whole = [size for size in sizes if size == (60, 90)]
    assert 15 < len(whole) < 55  # half, and the windows that happen to cover all
    assert min(min(size) for size in sizes) >= 60 * 384 // 600
    assert all(height <= 60 and width <= 90 for height, width in sizes)


def test_jitter_changes_colours_and_nothing_else():
    image, objects = planted()
    seed_all(0)
    picture, target = TrainObjects(flip=0.0, jitter=0.5)(image, objects)
    straight, _ = EvalObjects()(image, objects)
    assert not torch.equal(picture, straight)
    assert target["boxes"].tolist() == objects.boxes.tolist()


def test_what_is_left_of_an_object_gets_the_box_around_it_and_specks_go():
    masks = torch.zeros(3, 10, 10, dtype=torch.uint8)
    masks[0, 2:5, 3:9] = 1
    masks[1, 0, 0:3] = 1  # a line
    boxes = tight_boxes(masks)
    assert boxes.tolist() == [[3, 2, 9, 5], [0, 0, 3, 1], [0, 0, 0, 0]]
    target = {
        "boxes": tv_tensors.BoundingBoxes(torch.zeros(3, 4), format="XYXY", canvas_size=(10, 10)),
        "labels": torch.tensor([1, 2, 3]),
        "masks": tv_tensors.Mask(masks),
    }
    left = drop_cropped_objects(target)
    assert left["labels"].tolist() == [1]
    assert left["boxes"].tolist() == [[3, 2, 9, 5]]
    assert isinstance(left["masks"], tv_tensors.Mask)  # so that the next step knows it


def test_wrong_crops_are_told():
    with pytest.raises(DataError, match="none, resized, detr"):
        TrainObjects(crop="pad")
    with pytest.raises(DataError, match=r"Set data.image_size"):
        TrainObjects(crop="resized")


def test_scenes_know_their_objects():
    scenes = SceneObjects(4, 64)
    for i in range(4):
        objects, frame = scenes.objects(i), scenes.frame(i)
        assert objects.masks is not None
        np.testing.assert_array_equal(tight_boxes(torch.from_numpy(objects.masks)).numpy(), objects.boxes)
        assert (objects.masks.sum(0) <= 1).all()  # the one in front hides the others
        assert objects.labels.tolist() == (frame.shapes + 1).tolist()
    assert len(scenes.ground_truth()["annotations"]) == sum(len(scenes.objects(i).labels) for i in range(4))
    assert len({note["id"] for note in scenes.ground_truth()["annotations"]}) > 4


def test_batches_are_the_same_with_and_without_processes():
    scenes, order = SceneObjects(8, 32), Order(8, 4, seed=3)
    batches = [list(ObjectLoader(scenes, TrainObjects(32, "resized"), order, workers).epoch(1)) for workers in (0, 2)]
    assert len(batches[0]) == 2
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.indices, other.indices)
        for a, b in zip(one.images, other.images, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(one.labels, other.labels, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_masks_travel_eight_pixels_a_byte(count, width):
    masks = torch.randint(2, (count, 5, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    packed = pack_masks(masks)
    assert packed.shape == (count, 5, -(-width // 8))
    assert torch.equal(unpack_masks(packed, width), masks)


def test_training_batches_carry_the_masks_of_their_pictures_and_evaluation_needs_none():
    scenes = SceneObjects(4, 36)
    (batch,) = ObjectLoader(scenes, EvalObjects(), Order(4, 4), workers=0).epoch(0)
    for target, index in zip(batch.labels, batch.indices.tolist(), strict=True):
        true = trainable_objects(scenes.objects(index), (36, 36))
        assert torch.equal(unpack_masks(target["masks"], 36), torch.from_numpy(true.masks))
        assert torch.equal(target["boxes"], torch.from_numpy(true.boxes))
    for batch in ObjectEvalLoader(scenes, 2, 0):
        assert [set(target) for target in batch.labels] == [{"boxes", "labels"}] * 2


def test_a_bad_picture_is_replaced_in_training_and_left_out_in_evaluation(tmp_path):
    write(tmp_path)
    (tmp_path / "train" / "b.png").write_bytes(b"not a picture")
    source, _ = open_train_and_val_objects(tmp_path, val_path=tmp_path)
    (batch,) = ObjectLoader(source, EvalObjects(), Order(3, 3), workers=0).epoch(0)
    assert len(batch.images) == 3
    assert [index for index, _ in batch.bad] == [2]
    assert 2 not in batch.indices.tolist()
    batches = list(ObjectEvalLoader(source, 2, workers=0))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1], []]
    assert "b.png" in batches[1].bad[0][1]
