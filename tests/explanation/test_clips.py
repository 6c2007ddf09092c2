"""Video input."""

import numpy as np
import pytest
import torch

from saccade.data.decode.inputs import list_inputs
from saccade.data.decode.video import VideoFile, write_video
from saccade.data.synthetic.motions import MotionSet
from saccade.explanation.clips import load_clip


def test_clip_is_the_middle_of_the_video_at_two_resolutions():
    pixels = MotionSet(8, 64, 12).read(4).pixels
    view = load_clip(pixels, 64, 4, 2, "zoom")
    assert view.clip.shape == (3, 4, 64, 64)
    assert view.frames.shape == (4, 224, 224, 3)
    np.testing.assert_array_equal((view.clip.permute(1, 2, 3, 0) * 255).round().byte().numpy(), pixels[3:11:2])


def test_tensor_and_array_give_the_same_clip():
    pixels = MotionSet(8, 64, 12).read(4).pixels
    tensor = torch.from_numpy(pixels).permute(3, 0, 1, 2).float() / 255
    assert torch.equal(load_clip(tensor, 64, 4, 2).clip, load_clip(pixels, 64, 4, 2).clip)


def test_list_inputs_splits_batches_only(tmp_path):
    write_video(tmp_path / "a.mp4", np.zeros((2, 16, 16, 3), np.uint8))
    assert len(list_inputs(torch.zeros(2, 3, 4, 8, 8), videos=True)) == 2
    assert len(list_inputs(torch.zeros(3, 4, 8, 8), videos=True)) == 1
    for clip in (VideoFile(tmp_path / "a.mp4"), str(tmp_path / "a.mp4")):
        assert len(list_inputs(clip, videos=True)) == 1
    assert list_inputs(iter(["a.mp4", "b.mp4"]), videos=True) == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize("source", [np.zeros((4, 8, 8), np.uint8), np.zeros((0, 8, 8, 3), np.uint8), 3])
def test_other_sources_are_refused(source):
    with pytest.raises(ValueError, match=r"expected a (uint8 clip \(T, H, W, 3\)|video file)"):
        load_clip(source, 32, 4, 1)
