"""The embedded set: seeded, endless, at any size, and too hard for a linear model."""

import numpy as np
import pytest

from saccade.data.sources.base import DataError
from saccade.data.synthetic.scenes import SHAPE_MOTIONS, SHAPES, Scenes


def test_a_scene_follows_from_seed_split_and_number_alone():
    again = Scenes(5).frame(3)
    np.testing.assert_array_equal(Scenes(100).frame(3).image, again.image)
    others = [Scenes(5, seed=1).frame(3), Scenes(5, split="val").frame(3), Scenes(5).frame(4)]
    assert all((other.image != again.image).mean() > 0.3 for other in others)


def test_the_set_has_no_end():
    assert Scenes(2).frame(10**9 + 7).label == (10**9 + 7) % len(SHAPES)


def test_it_looks_the_same_at_every_size():
    small, large = Scenes(1, size=32).frame(0), Scenes(1, size=128).frame(0)
    reduced = large.image.reshape(32, 4, 32, 4, 3).mean((1, 3))
    assert np.abs(small.image - reduced).mean() < 4
    assert (small.mask == large.mask[2::4, 2::4]).mean() > 0.97
    np.testing.assert_allclose(small.boxes[0] * 4, large.boxes[0], atol=4)


@pytest.mark.parametrize("index", range(12))
def test_label_mask_boxes_and_instances_tell_one_story(index):
    frame = Scenes(20, size=96).frame(index)
    assert frame.label == index % len(SHAPES) == frame.shapes[0]
    assert set(np.unique(frame.mask)) - {0} == {shape + 1 for shape in frame.shapes}
    for number, (box, shape) in enumerate(zip(frame.boxes, frame.shapes, strict=True)):
        rows, columns = np.nonzero(frame.instances == number + 1)
        assert (frame.mask[rows, columns] == shape + 1).all()
        assert tuple(box) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    sizes = [(frame.instances == n + 1).sum() for n in range(len(frame.boxes))]
    assert sizes[0] == max(sizes), "the class is that of the large object"


def test_every_shape_and_every_motion_occurs():
    scenes = Scenes(40, size=16)
    assert {scenes.frame(i).label for i in range(40)} == set(range(len(SHAPES)))
    assert {scenes.clip(i, frames=1).label for i in range(120)} == set(range(len(SHAPE_MOTIONS)))


def test_the_large_object_moves_as_the_clip_is_labelled():
    scenes, seen = Scenes(400, size=64), set()
    for index in range(400):
        clip = scenes.clip(index, frames=3)
        motion = SHAPE_MOTIONS[clip.label]
        large = [np.argwhere(frame.instances == 1) for frame in clip.frames]
        inside = all(spot.min(initial=1) > 0 and spot.max(initial=1) < 63 for spot in large)
        if motion in seen or not inside:
            continue
        seen.add(motion)
        (y0, x0), (y1, x1) = large[0].mean(0), large[2].mean(0)
        step = {"right": x1 - x0, "left": x0 - x1, "down": y1 - y0, "up": y0 - y1}
        if motion in step:
            assert step[motion] > 8
        elif motion in ("growing", "shrinking"):
            assert (len(large[2]) > 1.4 * len(large[0])) == (motion == "growing")
        elif motion == "still":
            np.testing.assert_array_equal(large[0], large[2])
    assert len(seen) == len(SHAPE_MOTIONS)


def test_turning_goes_the_way_its_name_says():
    """The long axis of two bars, from frame to frame; y points down, so a growing angle is clockwise on the screen."""
    scenes, seen = Scenes(400, size=64), set()
    for index in range(SHAPES.index("bars"), 400, len(SHAPES)):
        clip = scenes.clip(index, frames=12)
        motion = SHAPE_MOTIONS[clip.label]
        if motion not in ("clockwise", "counterclockwise") or motion in seen:
            continue
        seen.add(motion)
        angles = []
        for frame in clip.frames:
            y, x = np.argwhere(frame.instances == 1).T
            angles.append(0.5 * np.arctan2(2 * np.cov(x, y)[0, 1], np.var(x) - np.var(y)))
        steps = (np.diff(angles) + np.pi / 2) % np.pi - np.pi / 2
        assert (np.sign(steps) == (1 if motion == "clockwise" else -1)).all()
    assert len(seen) == 2


def test_a_linear_model_stays_near_chance():
    """Ridge regression on the pixels, the best linear model there is for this many pictures."""

    def pixels(split: str, count: int):
        scenes = Scenes(count, size=16, split=split)
        images = np.stack([scenes.frame(i).image for i in range(count)]).reshape(count, -1) / 255 - 0.5
        return images, scenes.labels

    images, labels = pixels("train", 1200)
    held, truth = pixels("val", 400)
    targets = np.eye(len(SHAPES))[labels] - 0.1
    weights = [np.linalg.solve(images.T @ images + r * np.eye(images.shape[1]), images.T @ targets) for r in (10, 300)]
    assert max(((held @ w).argmax(1) == truth).mean() for w in weights) < 0.22  # chance is 0.1


def test_wrong_questions():
    with pytest.raises(DataError, match="a split of train, val, test"):
        Scenes(split="dev")
    with pytest.raises(DataError, match="16 px"):
        Scenes(size=8)
