"""VT's assignment maps."""

import numpy as np
import pytest

from saccade.explanation.figures.vt import assignment_figure
from tests.explanation.planted import observation, quadrants, step, view


@pytest.mark.shows("VT-74", "PACA-44")
def test_assignment_is_red_where_the_weight_is_high_and_blue_elsewhere():
    one = step(quadrants(4), (32, 32))
    figure = assignment_figure(observation(view(32, 32, 128), one), one, "a_model")
    assert len(figure.panels) == 4
    for token, panel in enumerate(figure.panels):
        drawn = panel.image.astype(int)
        row, column = 4 + 24 * (token // 2), 4 + 24 * (token % 2)
        assert drawn[row, column, 0] > drawn[row, column, 2] + 60  # red
        assert drawn[31 - row, 31 - column, 2] > drawn[31 - row, 31 - column, 0] + 40  # blue
    assert "a_model, block 1, all 4 tokens" in figure.caption


def test_assignment_of_chosen_tokens():
    one = step(quadrants(4), (32, 32))
    figure = assignment_figure(observation(view(32, 32), one), one, "a_model", np.array([2, 0]))
    assert [panel.label for panel in figure.panels] == ["token 2", "token 0"]
    assert "2 of 4 tokens" in figure.caption
