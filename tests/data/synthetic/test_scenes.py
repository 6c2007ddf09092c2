"""The embedded scenes: deterministic, unbounded, independent of size, and too hard for a linear model."""

import numpy as np
import pytest
import torch

from saccade.data.sources.base import DataError
from saccade.data.sources.masks import read_pair
from saccade.data.synthetic.scenes import SHAPE_MOTIONS, SHAPES, SceneMasks, SceneObjects, Scenes
from saccade.data.transforms.objects import tight_boxes


def test_scene_depends_on_seed_split_and_index_only():
    frame = Scenes(5).frame(3)
    np.testing.assert_array_equal(Scenes(100).frame(3).image, frame.image)
    other_scenes = [Scenes(5, seed=1).frame(3), Scenes(5, split="val").frame(3), Scenes(5).frame(4)]
    assert all((other.image != frame.image).mean() > 0.3 for other in other_scenes)


def test_indices_beyond_the_count_work():
    assert Scenes(2).frame(10**9 + 7).label == (10**9 + 7) % len(SHAPES)


def test_scene_has_the_same_content_at_every_size():
    small, large = Scenes(1, size=32).frame(0), Scenes(1, size=128).frame(0)
    reduced = large.image.reshape(32, 4, 32, 4, 3).mean((1, 3))
    assert np.abs(small.image - reduced).mean() < 4
    assert (small.mask == large.mask[2::4, 2::4]).mean() > 0.97
    np.testing.assert_allclose(small.boxes[0] * 4, large.boxes[0], atol=4)


@pytest.mark.parametrize("index", range(12))
def test_label_mask_boxes_and_instances_are_consistent(index):
    frame = Scenes(20, size=96).frame(index)
    assert frame.label == index % len(SHAPES) == frame.shapes[0]
    assert set(np.unique(frame.mask)) - {0} == {shape + 1 for shape in frame.shapes}
    for number, (box, shape) in enumerate(zip(frame.boxes, frame.shapes, strict=True)):
        rows, columns = np.nonzero(frame.instances == number + 1)
        assert (frame.mask[rows, columns] == shape + 1).all()
        assert tuple(box) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    sizes = [(frame.instances == n + 1).sum() for n in range(len(frame.boxes))]
    assert sizes[0] == max(sizes), "the class is the shape of the largest object"


def test_every_shape_and_every_motion_occur():
    scenes = Scenes(40, size=16)
    assert {scenes.frame(i).label for i in range(40)} == set(range(len(SHAPES)))
    assert {scenes.clip(i, frames=1).label for i in range(120)} == set(range(len(SHAPE_MOTIONS)))


def test_large_object_moves_as_the_clip_is_labelled():
    scenes, checked = Scenes(400, size=64), set()
    for index in range(400):
        clip = scenes.clip(index, frames=3)
        motion = SHAPE_MOTIONS[clip.label]
        large = [np.argwhere(frame.instances == 1) for frame in clip.frames]
        inside = all(spot.min(initial=1) > 0 and spot.max(initial=1) < 63 for spot in large)
        if motion in checked or not inside:
            continue
        checked.add(motion)
        (y0, x0), (y1, x1) = large[0].mean(0), large[2].mean(0)
        step = {"right": x1 - x0, "left": x0 - x1, "down": y1 - y0, "up": y0 - y1}
        if motion in step:
            assert step[motion] > 8
        elif motion in ("growing", "shrinking"):
            assert (len(large[2]) > 1.4 * len(large[0])) == (motion == "growing")
        elif motion == "still":
            np.testing.assert_array_equal(large[0], large[2])
    assert len(checked) == len(SHAPE_MOTIONS)


def test_rotation_direction_matches_its_name():
    """The principal axis of the two bars; y points down, so a growing angle is clockwise on the screen."""
    scenes, checked = Scenes(400, size=64), set()
    for index in range(SHAPES.index("bars"), 400, len(SHAPES)):
        clip = scenes.clip(index, frames=12)
        motion = SHAPE_MOTIONS[clip.label]
        if motion not in ("clockwise", "counterclockwise") or motion in checked:
            continue
        checked.add(motion)
        angles = []
        for frame in clip.frames:
            y, x = np.argwhere(frame.instances == 1).T
            angles.append(0.5 * np.arctan2(2 * np.cov(x, y)[0, 1], np.var(x) - np.var(y)))
        steps = (np.diff(angles) + np.pi / 2) % np.pi - np.pi / 2
        assert (np.sign(steps) == (1 if motion == "clockwise" else -1)).all()
    assert len(checked) == 2


def test_linear_model_stays_near_chance():
    """Ridge regression on the pixels reaches less than 22 %; chance is 10 %."""

    def pixels(split: str, count: int):
        scenes = Scenes(count, size=16, split=split)
        images = np.stack([scenes.frame(i).image for i in range(count)]).reshape(count, -1) / 255 - 0.5
        return images, scenes.labels

    images, labels = pixels("train", 1200)
    val_images, val_labels = pixels("val", 400)
    targets = np.eye(len(SHAPES))[labels] - 0.1
    weights = [np.linalg.solve(images.T @ images + r * np.eye(images.shape[1]), images.T @ targets) for r in (10, 300)]
    assert max(((val_images @ w).argmax(1) == val_labels).mean() for w in weights) < 0.22


def test_invalid_arguments_raise():
    with pytest.raises(DataError, match="a split of train, val, test"):
        Scenes(split="dev")
    with pytest.raises(DataError, match="16 px"):
        Scenes(size=8)


def test_scene_masks_contain_the_class_of_the_scene():
    source = SceneMasks(10, 64)
    image, mask = read_pair(source, 3)
    assert image.size == (64, 64)
    assert source.classes == ["backdrop", *SHAPES]
    assert Scenes(10, 64).labels[3] + 1 in np.unique(mask)


def test_scene_objects_match_the_frame():
    scenes = SceneObjects(4, 64)
    for i in range(4):
        objects, frame = scenes.objects(i), Scenes(4, 64).frame(i)
        assert objects.masks is not None
        np.testing.assert_array_equal(tight_boxes(torch.from_numpy(objects.masks)).numpy(), objects.boxes)
        assert (objects.masks.sum(0) <= 1).all(), "objects occlude each other"
        assert objects.labels.tolist() == (frame.shapes + 1).tolist()
    assert len(scenes.ground_truth()["annotations"]) == sum(len(scenes.objects(i).labels) for i in range(4))


def test_objects_occluded_by_more_than_half_are_crowd():
    scenes = SceneObjects(200, 32)
    occluded = 0
    for i in range(200):
        assert scenes.objects(i).crowd.tolist() == (scenes.frame(i).visible < 0.5).tolist()
        occluded += int(scenes.objects(i).crowd.sum())
    assert occluded == 15


def test_objects_are_drawn_once_per_index():
    scenes = SceneObjects(4, 32)
    assert scenes.frame(1) is scenes.frame(1)
    assert scenes.frame(2) is not scenes.frame(1)
    assert scenes.read(2).tobytes() == Scenes(4, 32).read(2).tobytes()
