"""Explanation of one clip."""

import numpy as np
import pytest
import torch

import saccade
from saccade.data.decode.video import write_video
from saccade.data.synthetic.motions import MOTIONS, MotionSet

SMALL = dict(num_tokens=4, focus_dim=32, cortex_dim=32, depth=2, repeats=2, heads=4, points=9, channels=8)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return saccade.create_model("video_sparseformer_nano", **SMALL).eval()


def test_clip_has_its_figures_and_arrays(model, tmp_path):
    write_video(tmp_path / "left.mp4", MotionSet(8, 48, 12).read(0).pixels)
    (tmp_path / "bad.mp4").write_text("nothing")
    sources = [tmp_path / "left.mp4", tmp_path / "bad.mp4"]
    explanation = saccade.explain(sources, model, labels=MOTIONS, out=tmp_path / "out")
    assert list(explanation.skipped) == ["bad.mp4"]
    clip = explanation["left.mp4"]
    assert set(clip.figures) == {"tubes", "timing", "responses", "animation"}
    assert clip.target in MOTIONS
    assert [step["grid"] for step in clip.steps] == [[8, 16, 16]] * 3
    assert [step["title"] for step in clip.steps] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]
    assert clip.arrays["importance/gradient/cortex.blocks.0"].shape == (16,)
    assert clip.arrays["importance/occlusion/cortex.blocks.0"].shape == (16,)
    assert clip.arrays["frame_fractions/focus.blocks.0.1"].shape == (16, 8)
    assert "data:image/webp" in (tmp_path / "out" / "report.html").read_text()
    assert {path.name for path in (tmp_path / "out" / "left").iterdir()} == {
        *("tubes.png", "timing.png", "responses.png", "animation.png", "animation.gif", "animation.webp")
    }


def test_occlusion_of_many_tokens_needs_to_be_the_only_kind(model, monkeypatch):
    monkeypatch.setattr("saccade.explanation.clip_explanation.MAX_OCCLUSION", 15)
    clip = np.zeros((8, 48, 48, 3), np.uint8)
    both = saccade.explain(clip, model)[0]
    assert [key for key in both.arrays if key.startswith("importance/")] == ["importance/gradient/cortex.blocks.0"]
    only = saccade.explain(clip, model, importance=("occlusion",))[0]
    assert [key for key in only.arrays if key.startswith("importance/")] == ["importance/occlusion/cortex.blocks.0"]
