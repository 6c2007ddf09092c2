"""Tubes drawn over time: in the frames they pass through, at the places they name, and moving."""

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.data.motion import MOTIONS, MotionSet
from saccade.data.video import VideoFile, write_video
from saccade.explain.clips import ClipView, as_clips, load_clip
from saccade.explain.drawing.colours import token_colours
from saccade.explain.figures.tubes import chosen_frames, draw_frame, film_figure, presence, strip_figure, when_figure
from saccade.tokens.trace import TubeTrace

SMALL = dict(num_tokens=4, focus_dim=32, cortex_dim=32, depth=2, repeats=2, heads=4, points=9, channels=8)


def planted() -> TubeTrace:
    """Two tokens in a clip of 4 frames: one left in the first half, one right in the second; points in their middle."""
    regions = torch.tensor([[[0.1, 0.2, 0.0, 0.4, 0.8, 0.5], [0.6, 0.2, 0.5, 0.9, 0.8, 1.0]]])
    points = torch.tensor([[[[0.25, 0.5, 0.125]] * 3, [[0.75, 0.5, 0.75]] * 3]])  # frame 0; between frames 2 and 3
    return TubeTrace(regions, points, (4, 10, 10))


def grey(frames: int = 4) -> ClipView:
    return ClipView("grey", torch.full((3, frames, 32, 32), 0.5), np.full((frames, 100, 100, 3), 128, np.uint8))


def drawn_in(picture: np.ndarray, token: int) -> np.ndarray:
    """Where a picture has the colour of a token: rows and columns."""
    return np.argwhere((picture == token_colours(2)[token]).all(-1))


def test_presence_is_the_share_of_points_read_from_a_frame():
    torch.testing.assert_close(presence(planted()), torch.tensor([[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]]))


def test_a_tube_is_drawn_in_its_frames_only():
    trace, view = planted(), grey()
    for number in range(4):
        picture = draw_frame(view.pictures[number], trace, number)
        first, second = drawn_in(picture, 0), drawn_in(picture, 1)
        assert bool(len(first)) == (number < 2)
        assert bool(len(second)) == (number >= 2)
        rows, columns = (first if number < 2 else second).T
        left, right = (10, 40) if number < 2 else (60, 90)
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 79, left, right - 1)


def test_points_are_larger_where_they_are_read_more():
    trace = planted()._replace(regions=torch.zeros(1, 2, 6) - 1)  # no boxes: the tubes lie before the clip
    sizes = [len(drawn_in(draw_frame(grey().pictures[n], trace, n), 0)) for n in range(4)]
    half = [len(drawn_in(draw_frame(grey().pictures[n], trace, n), 1)) for n in range(4)]
    assert sizes[0] > 0
    assert sizes[1:] == [0, 0, 0]
    assert half[:2] == [0, 0]
    assert half[2] == half[3] > 0
    near = drawn_in(draw_frame(grey().pictures[0], trace, 0), 0)
    assert abs(near.mean(0) - [49.5, 24.5]).max() <= 0.5


def test_only_the_tokens_asked_for_are_drawn():
    picture = draw_frame(grey().pictures[0], planted(), 0, [1])
    assert (picture == 128).all()
    assert len(drawn_in(draw_frame(grey().pictures[3], planted(), 3, [1]), 1))


def test_the_chart_of_time_is_sorted_and_bright_where_a_token_looks():
    figure = when_figure([planted()._replace(regions=planted().regions.flip(1), points=planted().points.flip(1))], "m")
    picture = figure.panels[0].picture.sum(-1)
    height, width = picture.shape
    cells = picture[height // 4 :: height // 2, width // 8 :: width // 4][:2]
    assert (cells > cells.min()).tolist() == [[True, False, False, False], [False, False, True, True]]


def test_a_strip_has_a_row_for_every_look():
    figure = strip_figure(grey(), [planted(), planted()], "m")
    assert (len(figure.panels), figure.columns) == (8, 4)
    assert chosen_frames(32) == [0, 4, 9, 13, 18, 22, 27, 31]


def test_a_film_is_written_as_gif_and_webp(tmp_path):
    frames = np.stack([np.full((100, 100, 3), 98 + 10 * i, np.uint8) for i in range(4)])  # equal ones are merged
    figure = film_figure(grey()._replace(pictures=frames), planted(), None, "All tubes", "m")
    figure.save(tmp_path / "film.png")
    for name in ("film.gif", "film.webp"):
        with Image.open(tmp_path / name) as film:
            assert (film.n_frames, film.is_animated) == (4, True)
            film.seek(3)
            shown = np.array(film.convert("RGB")).astype(int)
            assert abs(shown[50, 61] - token_colours(2)[1]).max() < 60  # the right tube, in the last frame
            assert abs(shown[50, 11] - 128).max() < 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return saccade.create_model("video_sparseformer_nano", **SMALL).eval()


def test_a_clip_is_explained(model, tmp_path):
    write_video(tmp_path / "left.mp4", MotionSet(8, 48, 12).read(0).pixels)
    (tmp_path / "bad.mp4").write_text("nothing")
    found = saccade.explain([tmp_path / "left.mp4", tmp_path / "bad.mp4"], model, labels=MOTIONS, out=tmp_path / "out")
    assert list(found.skipped) == ["bad.mp4"]
    clip = found["left.mp4"]
    assert set(clip.figures) == {"tubes", "when", "responding", "film"}
    assert clip.target in MOTIONS
    assert [step["grid"] for step in clip.steps] == [[8, 16, 16]] * 3
    assert clip.arrays["importance/gradient/cortex.blocks.0"].shape == (16,)
    assert clip.arrays["importance/occlusion/cortex.blocks.0"].shape == (16,)
    assert clip.arrays["presence/focus.blocks.0.1"].shape == (16, 8)
    assert "data:image/webp" in (tmp_path / "out" / "report.html").read_text()
    assert {path.name for path in (tmp_path / "out" / "left").iterdir()} == {
        *("tubes.png", "when.png", "responding.png", "film.png", "film.gif", "film.webp")
    }


def test_what_the_model_gets_is_what_is_drawn(tmp_path):
    pixels = MotionSet(8, 64, 12).read(4).pixels
    view = load_clip(pixels, 64, 4, 2, "zoom")
    assert view.clip.shape == (3, 4, 64, 64)
    assert view.pictures.shape == (4, 224, 224, 3)
    np.testing.assert_array_equal((view.clip.permute(1, 2, 3, 0) * 255).round().byte().numpy(), pixels[3:11:2])
    again = load_clip(torch.from_numpy(pixels).permute(3, 0, 1, 2).float() / 255, 64, 4, 2)
    assert torch.equal(view.clip, again.clip)


def test_clips_come_in_many_forms(tmp_path):
    write_video(tmp_path / "a.mp4", np.zeros((2, 16, 16, 3), np.uint8))
    assert len(as_clips(torch.zeros(2, 3, 4, 8, 8))) == 2
    assert len(as_clips(torch.zeros(3, 4, 8, 8))) == 1
    assert len(as_clips(VideoFile(tmp_path / "a.mp4"))) == len(as_clips(str(tmp_path / "a.mp4"))) == 1
    for wrong in (np.zeros((4, 8, 8), np.uint8), np.zeros((0, 8, 8, 3), np.uint8), 3):
        with pytest.raises(ValueError, match="expected a"):
            load_clip(wrong, 32, 4, 1)
