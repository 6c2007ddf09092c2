"""Tubes of VideoSparseFormer, drawn in the frames they contain."""

import numpy as np
import torch
from PIL import Image

from saccade.explanation.clips import ClipView
from saccade.explanation.drawing.colours import token_colours
from saccade.explanation.figures.tubes import (
    animation_figure,
    clip_response_figure,
    draw_tubes,
    evenly_spaced_frames,
    frame_fractions,
    timing_figure,
    tube_figure,
)
from saccade.tokens.trace import TubeTrace


def planted() -> TubeTrace:
    """Two tokens in a clip of 4 frames: one left in the first half, one right in the second; points at their centre."""
    regions = torch.tensor([[[0.1, 0.2, 0.0, 0.4, 0.8, 0.5], [0.6, 0.2, 0.5, 0.9, 0.8, 1.0]]])
    points = torch.tensor([[[[0.25, 0.5, 0.125]] * 3, [[0.75, 0.5, 0.75]] * 3]])  # frame 0; between frames 2 and 3
    return TubeTrace(regions, points, (4, 10, 10))


def grey(frames: int = 4) -> ClipView:
    return ClipView("grey", torch.full((3, frames, 32, 32), 0.5), np.full((frames, 100, 100, 3), 128, np.uint8))


def pixels_of(image: np.ndarray, token: int) -> np.ndarray:
    """Rows and columns of the pixels with the colour of a token."""
    return np.argwhere((image == token_colours(2)[token]).all(-1))


def test_frame_fractions_are_interpolation_weights():
    torch.testing.assert_close(frame_fractions(planted()), torch.tensor([[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]]))


def test_tube_is_drawn_in_the_frames_it_contains():
    trace, view = planted(), grey()
    for frame in range(4):
        image = draw_tubes(view.frames[frame], trace, frame)
        first, second = pixels_of(image, 0), pixels_of(image, 1)
        assert bool(len(first)) == (frame < 2)
        assert bool(len(second)) == (frame >= 2)
        rows, columns = (first if frame < 2 else second).T
        left, right = (10, 40) if frame < 2 else (60, 90)
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 79, left, right - 1)


def test_points_are_larger_for_larger_weights():
    time = torch.tensor([0.125, 0.125 + 0.6 / 4])  # weights 1 and 0.4 in frame 0
    points = torch.stack([torch.full((2,), 0.25), torch.full((2,), 0.5), time], 1)
    trace = planted()._replace(regions=torch.zeros(1, 2, 6) - 1, points=points[None, :, None])  # no tube in the clip
    image = np.full((440, 440, 3), 128, np.uint8)
    full, partial = (len(pixels_of(draw_tubes(image, trace, 0, [token]), token)) for token in (0, 1))
    assert full > 2 * partial > 0


def test_points_are_drawn_in_the_frames_they_are_sampled_from():
    trace = planted()._replace(regions=torch.zeros(1, 2, 6) - 1)
    first, second = ([len(pixels_of(draw_tubes(grey().frames[n], trace, n), i)) for n in range(4)] for i in (0, 1))
    assert first[0] > 0
    assert first[1:] == [0, 0, 0]
    assert second[:2] == [0, 0]
    assert second[2] == second[3] > 0
    near = pixels_of(draw_tubes(grey().frames[0], trace, 0), 0)
    assert abs(near.mean(0) - [49.5, 24.5]).max() <= 0.5


def test_only_chosen_tokens_are_drawn():
    image = draw_tubes(grey().frames[0], planted(), 0, [1])
    assert (image == 128).all()
    assert len(pixels_of(draw_tubes(grey().frames[3], planted(), 3, [1]), 1))


def test_timing_figure_is_sorted_by_mean_frame():
    trace = planted()._replace(regions=planted().regions.flip(1), points=planted().points.flip(1))
    figure = timing_figure([trace], "m")
    image = figure.panels[0].image.sum(-1)
    height, width = image.shape
    cells = image[height // 4 :: height // 2, width // 8 :: width // 4][:2]
    assert (cells > cells.min()).tolist() == [[True, False, False, False], [False, False, True, True]]
    assert figure.panels[0].label == "step 1 of 1"


def test_tube_figure_has_a_row_per_step():
    figure = tube_figure(grey(), [planted(), planted()._replace(name="second")], "m")
    assert (len(figure.panels), figure.columns) == (8, 4)
    assert [figure.panels[i].note for i in (0, 4)] == ["step 1 of 2", "step 2 of 2"]
    assert figure.panels[3].note == "mean tube length 50% of the clip"


def test_frames_of_a_row_are_evenly_spaced():
    assert evenly_spaced_frames(32) == [0, 4, 9, 13, 18, 22, 27, 31]
    assert evenly_spaced_frames(3) == [0, 1, 2]


def test_response_figure_draws_the_top_token_only():
    figure = clip_response_figure(grey(), planted(), torch.tensor([1.0, 2.0]), "left", "m", top=1)
    assert [bool(len(pixels_of(panel.image, 1))) for panel in figure.panels] == [False, False, True, True]
    assert not any(len(pixels_of(panel.image, 0)) for panel in figure.panels)
    assert "highest logits of 2 tokens: 1 (2)." in figure.caption


def test_animation_is_written_as_gif_and_webp(tmp_path):
    frames = np.stack([np.full((100, 100, 3), 98 + 10 * i, np.uint8) for i in range(4)])  # equal frames are merged
    figure = animation_figure(grey()._replace(frames=frames), planted(), None, "All tubes", "m")
    figure.save(tmp_path / "animation.png")
    for name in ("animation.gif", "animation.webp"):
        with Image.open(tmp_path / name) as animation:
            assert (animation.n_frames, animation.is_animated) == (4, True)
            animation.seek(3)
            shown = np.array(animation.convert("RGB")).astype(int)
            assert abs(shown[50, 61] - token_colours(2)[1]).max() < 60  # the right tube, in the last frame
            assert abs(shown[50, 11] - 128).max() < 30
