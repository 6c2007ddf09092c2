"""Which frames, cut how: the papers' protocol, short videos, and one throw of the dice for a whole clip."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.data.decode.video import VideoFrames
from saccade.data.loader import seed_all
from saccade.data.transforms.clips import EvalClip, TrainClip, clip_indices
from saccade.data.transforms.image import train_transform
from saccade.tasks.video import average_views


def test_32_frames_of_128_four_apart():
    """SF-63."""
    assert clip_indices(128, 32, 4, 0.0) == list(range(0, 128, 4))
    assert clip_indices(325, 32, 4, 0.0) == list(range(0, 128, 4))
    assert clip_indices(325, 32, 4, 0.5) == list(range(100, 228, 4))
    assert clip_indices(325, 32, 4, 1.0) == list(range(200, 328, 4))  # the last one is frame 324


def test_a_short_video_is_spread_over_the_clip():
    assert clip_indices(64, 32, 4, 0.7) == list(range(0, 64, 2))
    assert clip_indices(8, 16, 4) == [i // 2 for i in range(16)]
    assert clip_indices(1, 4, 4, 1.0) == [0, 0, 0, 0]
    assert clip_indices(9, 1, 4) == [4]  # the middle frame


@given(count=st.integers(1, 5000), frames=st.integers(1, 64), stride=st.integers(1, 8), start=st.floats(0, 1))
def test_numbers_ascend_inside_the_video(count, frames, stride, start):
    numbers = clip_indices(count, frames, stride, start)
    assert len(numbers) == frames
    assert numbers == sorted(numbers)
    assert 0 <= numbers[0] <= numbers[-1] < count
    if count > (frames - 1) * stride:
        assert set(np.diff(numbers)) <= {stride}


def noise(frames: int = 12, height: int = 40, width: int = 56, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(frames, height, width, 3)).astype(np.uint8)


def test_every_frame_of_a_clip_is_changed_alike():
    """A still video stays still, through crops, flips and whatever RandAugment draws; another throw differs."""
    change = train_transform(24, scale=(0.2, 1.0), auto_augment="rand-m9-n3-mstd0.5-inc1")
    clip = TrainClip(6, 2, change)
    still = VideoFrames(np.repeat(noise(1), 20, axis=0))
    seen = []
    for seed in range(4):
        seed_all(seed)
        out = clip(still)
        assert out.shape == (3, 6, 24, 24)
        assert (out == out[:, :1]).all()
        seen.append(out)
    assert len({tuple(out.flatten().tolist()) for out in seen}) == 4


def test_training_clips_start_anywhere():
    numbered = VideoFrames(np.stack([np.full((8, 8, 3), i, np.uint8) for i in range(100)]))
    clip = TrainClip(4, 2, train_transform(8, crop="none", flip=0.0))
    starts = set()
    for seed in range(60):
        seed_all(seed)
        values = clip(numbered)[0, :, 0, 0].int()
        assert (values.diff() == 2).all()
        starts.add(int(values[0]))
    assert len(starts) > 30
    assert max(starts) <= 92


def test_views_are_all_places_at_all_times():
    """12 views of a wide video: a frame's number is in its red, a column's in its green."""
    frames = np.zeros((400, 10, 30, 3), np.uint8)
    frames[..., 0] = (np.arange(400) // 2)[:, None, None]
    frames[..., 1] = np.arange(30)
    views = EvalClip(10, 32, 4, clips=4, crops=3)(VideoFrames(frames))
    assert views.shape == (12, 3, 32, 10, 10)
    for i, view in enumerate(views):
        clip, crop = divmod(i, 3)
        first = round(clip * (400 - 125) / 3)
        assert view[0, :, 0, 0].tolist() == [n // 2 for n in range(first, first + 128, 4)]
        assert view[1, 0, 0].tolist() == list(range(10 * crop, 10 * crop + 10))


def test_a_tall_video_is_cut_from_top_to_bottom():
    frames = np.zeros((4, 30, 10, 3), np.uint8)
    frames[..., 1] = np.arange(30)[:, None]
    views = EvalClip(10, 4, 1, crops=3)(VideoFrames(frames))
    assert views[:, 1, 0, 0, 0].tolist() == [0, 10, 20]


def test_one_view_is_the_middle():
    frames = noise()
    view = EvalClip(20, 4, 2, crop_pct=0.5)(VideoFrames(frames))
    assert torch.equal(view, torch.from_numpy(frames[3:11:2, 10:30, 18:38]).permute(3, 0, 1, 2))


def test_one_frame_is_a_picture():
    frames = noise()
    picture = EvalClip(40, 1, 4)(VideoFrames(frames))
    assert torch.equal(picture, torch.from_numpy(frames[6, :, 8:48]).permute(2, 0, 1))
    assert TrainClip(1, 4, train_transform(16))(VideoFrames(frames)).shape == (3, 16, 16)
    assert EvalClip(40, 1, 4, clips=2, crops=2)(VideoFrames(frames)).shape == (4, 3, 40, 40)


@pytest.mark.parametrize("count", [1, 12])
def test_averaged_views_are_the_mean_of_the_single_ones(count):
    """SF-65, and as logits: their softmax is the mean, their cross-entropy the mean's."""
    logits = 5 * torch.randn(3, count, 7, generator=torch.Generator().manual_seed(0))
    mean = logits.softmax(-1).mean(1)
    together = average_views(logits)
    torch.testing.assert_close(together.softmax(-1), mean)
    torch.testing.assert_close(together, mean.log())
