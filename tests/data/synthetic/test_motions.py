"""The embedded motions: their classes are visible in time only."""

import math

import numpy as np
import pytest
import torch

from saccade.data.decode.video import VideoFile
from saccade.data.loader import Order
from saccade.data.synthetic.motions import (
    MOTIONS,
    SIDE_RANGE,
    VAL_PHOTOS,
    MotionEvalLoader,
    MotionLoader,
    MotionSet,
    Windows,
    hash_uniform,
    load_photos,
    render_windows,
    sample_windows,
    write_motions,
)
from saccade.data.synthetic.photos import photo_paths

CENTRED = torch.tensor([0.0, 0.25, 0.25, 0.0, 0.4, 1.0, 0.75])  # first photograph, its centre, upright, full speed


def windows(motion: str, frames: int = 5, uniforms: torch.Tensor = CENTRED) -> Windows:
    return sample_windows(torch.tensor([MOTIONS.index(motion)]), frames, 3, uniforms[None])


def clip_of(motion: str, uniforms: torch.Tensor, size: int = 32) -> torch.Tensor:
    return render_windows(load_photos(32), windows(motion, 5, uniforms), size)[0].float()


def test_content_moves_as_the_class_says():
    """The centre of mass of a bright dot in the middle of the photograph."""
    photo = torch.zeros(1, 3, 63, 63)
    photo[:, :, 31, 31] = 1
    directions = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
    for motion, (dx, dy) in directions.items():
        clip = render_windows(photo, windows(motion)._replace(photo=torch.zeros(1).long()), 48)[
            0, 0
        ].float()  # (T, H, W)
        weight = clip / clip.sum((1, 2), keepdim=True)
        x = (weight.sum(1) * torch.arange(48)).sum(1)
        y = (weight.sum(2) * torch.arange(48)).sum(1)
        assert math.isclose(x[-1] - x[0], dx * 0.6 * 48, abs_tol=1), motion  # 0.6 of the window at full speed
        assert math.isclose(y[-1] - y[0], dy * 0.6 * 48, abs_tol=1), motion


def test_zoom_changes_the_window_side_by_a_factor_of_2():
    for motion, factor in (("zoom in", 0.5), ("zoom out", 2.0)):
        side = windows(motion, uniforms=CENTRED).side[0]
        assert math.isclose(side[-1] / side[0], factor, rel_tol=1e-4)


def test_rotation_has_both_directions():
    one, other = (
        windows("rotate").angle[0],
        windows("rotate", uniforms=CENTRED * torch.tensor([1, 1, 1, 1, 1, 1, 0.0])).angle[0],
    )
    assert math.isclose(one[-1] - one[0], math.pi / 3, rel_tol=1e-4)
    torch.testing.assert_close(other, -one)


@pytest.mark.parametrize(
    ("motion", "reverse"),
    [("left", "right"), ("up", "down"), ("zoom in", "zoom out"), ("still", "still")],
)
def test_reversed_clip_is_a_clip_of_the_opposite_class(motion, reverse):
    """Pixel by pixel, for the same random numbers."""
    uniforms = torch.rand(7, generator=torch.Generator().manual_seed(0))
    difference = (clip_of(motion, uniforms).flip(1) - clip_of(reverse, uniforms)).abs().max()
    assert difference <= 1  # of 255: rounding


def test_single_frames_follow_one_distribution_for_all_classes():
    """Kolmogorov-Smirnov test of position, angle and side of the window, at every frame."""
    generator, count = torch.Generator().manual_seed(0), 4000
    uniforms = torch.rand(count, 7, generator=generator)
    still = sample_windows(torch.full((count,), MOTIONS.index("still")), 4, 6, uniforms)
    for motion in MOTIONS[:-1]:
        uniforms = torch.rand(count, 7, generator=generator)
        moving = sample_windows(torch.full((count,), MOTIONS.index(motion)), 4, 6, uniforms)
        for frame in range(4):
            for name, a, b in (
                ("x", moving.centre[:, frame, 0] % 2, still.centre[:, frame, 0] % 2),
                ("y", moving.centre[:, frame, 1] % 2, still.centre[:, frame, 1] % 2),
                ("angle", moving.angle[:, frame] % (2 * math.pi), still.angle[:, frame] % (2 * math.pi)),
                ("side", moving.side[:, frame].log(), still.side[:, frame].log()),
            ):
                assert ks_distance(a, b) < 1.95 * (2 / count) ** 0.5, (motion, frame, name)  # chance: 1 in 1000


def ks_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of the two empirical distribution functions."""
    places = torch.cat([a, b]).sort().values
    below = [torch.searchsorted(values.sort().values, places, right=True) / len(values) for values in (a, b)]
    return float((below[0] - below[1]).abs().max())


def test_window_sides_stay_in_their_range():
    uniforms = torch.rand(500, 7, generator=torch.Generator().manual_seed(0))
    for motion in ("zoom in", "zoom out"):
        side = sample_windows(torch.full((500,), MOTIONS.index(motion)), 9, 6, uniforms).side
        assert side.min() >= SIDE_RANGE[0] - 1e-6
        assert side.max() <= SIDE_RANGE[1] + 1e-6


def test_clip_depends_on_seed_split_and_index_only():
    first, again, other = MotionSet(16, 32, 4), MotionSet(64, 32, 4), MotionSet(16, 32, 4, seed=1)
    assert torch.equal(first.clips([3, 5]), again.clips([3, 5]))
    assert torch.equal(first.clips([5]), first.clips([3, 5])[1:])
    assert not torch.equal(first.clips([3]), other.clips([3]))
    assert not torch.equal(first.clips([3]), first.clips([3], [1]))
    assert not torch.equal(first.clips([3]), MotionSet(16, 32, 4, "val").clips([3]))
    assert (first.labels == np.arange(16) % 8).all()
    assert first.clips([0]).shape == (1, 3, 4, 32, 32)
    assert np.array_equal(first.read(2).pixels, first.clips([2])[0].permute(1, 2, 3, 0).numpy())


def test_training_and_validation_use_different_photographs():
    names = list(photo_paths())
    every = load_photos(32, names)
    for split, used in (
        ("train", [n for n in names if n not in VAL_PHOTOS]),
        ("val", [*VAL_PHOTOS]),
        ("test", [*VAL_PHOTOS]),
    ):
        photos = MotionSet(8, 32, 4, split).photos
        assert len(photos) == len(used)
        for name, photo in zip(sorted(used), photos, strict=True):
            assert torch.equal(photo, every[names.index(name)])


def test_hash_uniform_is_uniform_and_independent():
    keys = np.column_stack([np.zeros((4000, 2), int), np.arange(4000), np.zeros(4000, int)])
    values = hash_uniform(keys, 7)
    assert values.min() >= 0
    assert values.max() < 1
    for column in values.T:
        assert ks_distance(torch.from_numpy(column), torch.linspace(0, 1, 4000)) < 1.95 * (2 / 4000) ** 0.5
    assert np.abs(np.corrcoef(values.T) - np.eye(7)).max() < 0.06
    assert np.abs(np.corrcoef(values[:-1].T, values[1:].T)[:7, 7:]).max() < 0.06  # of consecutive keys
    assert np.array_equal(values[17:18], hash_uniform(keys[17:18], 7))
    assert len(np.unique(hash_uniform(np.column_stack([keys[:, :2] + [5, 2], keys[:, 2:]]), 1))) > 3990


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="at least 1 frame"):
        MotionSet(frames=0)
    with pytest.raises(ValueError, match="a split of train, val, test"):
        MotionSet(split="valid")


def test_written_clips_are_read_back(tmp_path):
    write_motions(tmp_path, clips=8, size=64, frames=6)
    folders = sorted(path.name for path in (tmp_path / "train").iterdir())
    assert folders == sorted(MOTIONS)
    assert len(list((tmp_path / "val").rglob("*.mp4"))) == 8
    original = MotionSet(8, 64, 6).read(2).pixels.astype(int)
    video = VideoFile(tmp_path / "train" / MOTIONS[2] / "00002.mp4")
    assert len(video) == 6
    back = np.stack([np.array(frame) for frame in video.frames(range(6))])
    assert np.abs(back - original).mean() < 6  # of 255: H.264 is lossy


def test_motion_loader_renders_new_clips_of_the_same_classes_each_epoch():
    source = MotionSet(16, 32, 4)
    loader = MotionLoader(source, Order(16, 8, seed=1))
    first, second = (list(loader.epoch(epoch)) for epoch in (0, 1))
    for batches in (first, second):
        indices = torch.cat([batch.indices for batch in batches])
        assert sorted(indices.tolist()) == list(range(16))
        assert torch.equal(torch.cat([batch.labels for batch in batches]), indices % len(MOTIONS))
    images = {int(index): image for batch in first for index, image in zip(batch.indices, batch.images, strict=True)}
    assert not any(
        torch.equal(image, images[int(index)])
        for batch in second
        for index, image in zip(batch.indices, batch.images, strict=True)
    )
    again = next(loader.epoch(0, start=1))
    assert torch.equal(again.images, first[1].images)


def test_motion_eval_loader_renders_every_clip_once():
    source = MotionSet(10, 32, 4, "val")
    batches = list(MotionEvalLoader(source, 4, rank=1, world_size=2))
    assert [batch.indices.tolist() for batch in batches] == [[1, 3, 5, 7], [9]]
    assert torch.equal(batches[1].images, source.clips([9]))
    assert len(MotionEvalLoader(source, 4)) == 3


def test_motion_loaders_return_images_for_single_frames():
    (batch,) = MotionEvalLoader(MotionSet(2, 32, 1), 2)
    assert batch.images.shape == (2, 3, 32, 32)
