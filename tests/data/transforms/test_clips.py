"""Temporal sampling and cropping of clips: the papers' protocol, short videos, one augmentation per clip."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.decode.video import VideoFrames
from saccade.data.loader import seed_all
from saccade.data.transforms.clips import EvalClip, TrainClip, clip_indices
from saccade.data.transforms.image import train_transform
from saccade.tasks.video import average_views


@pytest.mark.shows("SF-63")
def test_clip_of_32_frames_with_stride_4_spans_128_frames():
    assert clip_indices(128, 32, 4, 0.0) == list(range(0, 128, 4))
    assert clip_indices(325, 32, 4, 0.0) == list(range(0, 128, 4))
    assert clip_indices(325, 32, 4, 0.5) == list(range(100, 228, 4))
    assert clip_indices(325, 32, 4, 1.0) == list(range(200, 328, 4))  # the last one is frame 324


def test_short_video_is_sampled_uniformly():
    assert clip_indices(64, 32, 4, 0.7) == list(range(0, 64, 2))
    assert clip_indices(8, 16, 4) == [i // 2 for i in range(16)]
    assert clip_indices(1, 4, 4, 1.0) == [0, 0, 0, 0]
    assert clip_indices(9, 1, 4) == [4]  # the middle frame


@settings(deadline=None)
@given(count=st.integers(1, 5000), frames=st.integers(1, 64), stride=st.integers(1, 8), start=st.floats(0, 1))
def test_clip_indices_ascend_inside_the_video(count, frames, stride, start):
    indices = clip_indices(count, frames, stride, start)
    assert len(indices) == frames
    assert indices == sorted(indices)
    assert 0 <= indices[0] <= indices[-1] < count
    if count > (frames - 1) * stride:
        assert set(np.diff(indices)) <= {stride}


def noise(frames: int = 12, height: int = 40, width: int = 56, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(frames, height, width, 3)).astype(np.uint8)


def test_all_frames_of_a_training_clip_get_the_same_augmentation():
    """A still video stays still through crop, flip and RandAugment; another seed gives another clip."""
    transform = train_transform(24, scale=(0.2, 1.0), auto_augment="rand-m9-n3-mstd0.5-inc1")
    clip = TrainClip(6, 2, transform)
    still = VideoFrames(np.repeat(noise(1), 20, axis=0))
    clips = []
    for seed in range(4):
        seed_all(seed)
        frames = clip(still)
        assert frames.shape == (3, 6, 24, 24)
        assert (frames == frames[:, :1]).all()
        clips.append(frames)
    assert len({tuple(out.flatten().tolist()) for out in clips}) == 4


def test_training_clips_start_at_random_frames():
    numbered = VideoFrames(np.stack([np.full((8, 8, 3), i, np.uint8) for i in range(100)]))
    clip = TrainClip(4, 2, train_transform(8, crop="none", flip=0.0))
    starts = set()
    for seed in range(2000):
        seed_all(seed)
        values = clip(numbered)[0, :, 0, 0].int()
        assert (values.diff() == 2).all()
        starts.add(int(values[0]))
    assert starts == set(range(94))  # 4 frames with stride 2 span 7 of 100


def test_views_combine_all_clips_and_crops():
    """12 views of a wide video whose red encodes the frame and green the column."""
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


def test_tall_video_is_cropped_from_top_to_bottom():
    frames = np.zeros((4, 30, 10, 3), np.uint8)
    frames[..., 1] = np.arange(30)[:, None]
    views = EvalClip(10, 4, 1, crops=3)(VideoFrames(frames))
    assert views[:, 1, 0, 0, 0].tolist() == [0, 10, 20]


def test_single_view_is_the_centre_of_the_middle_clip():
    frames = noise()
    view = EvalClip(20, 4, 2, crop_pct=0.5)(VideoFrames(frames))
    assert torch.equal(view, torch.from_numpy(frames[3:11:2, 10:30, 18:38]).permute(3, 0, 1, 2))


def test_clip_of_one_frame_is_an_image():
    frames = noise()
    image = EvalClip(40, 1, 4)(VideoFrames(frames))
    assert torch.equal(image, torch.from_numpy(frames[6, :, 8:48]).permute(2, 0, 1))
    assert TrainClip(1, 4, train_transform(16))(VideoFrames(frames)).shape == (3, 16, 16)
    assert EvalClip(40, 1, 4, clips=2, crops=2)(VideoFrames(frames)).shape == (4, 3, 40, 40)


@pytest.mark.shows("SF-65")
@pytest.mark.parametrize("count", [1, 12])
def test_average_views_returns_logits_of_the_mean_probability(count):
    logits = 5 * torch.randn(3, count, 7, generator=torch.Generator().manual_seed(0))
    mean = logits.softmax(-1).mean(1)
    averaged = average_views(logits)
    torch.testing.assert_close(averaged.softmax(-1), mean)
    torch.testing.assert_close(averaged, mean.log())
