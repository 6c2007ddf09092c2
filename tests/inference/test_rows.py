"""Rows of batch prediction: token summaries, and errors of single images."""

import pytest
import torch

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.inference.rows import RowPredictor, check_tokens, summarize_tokens
from saccade.tasks.predict import PredictOptions
from saccade.tasks.results import Unreadable
from saccade.tokens.trace import AssignmentTrace, RegionTrace, num_tokens
from tests.contract.names import NANOS

COLUMNS = ["token_centres", "token_areas", "token_norms", "token_regions"]


def test_region_token_has_the_centre_and_area_of_its_region():
    regions = torch.tensor([[[0.0, 0.2, 0.5, 0.6], [0.5, 0.5, 0.25, 0.75]]])  # the second is degenerate
    trace = RegionTrace(regions, torch.zeros(1, 2, 3, 2), (4, 4), torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]))
    (summary,) = summarize_tokens(trace)
    assert list(summary) == COLUMNS
    assert [value for pair in summary["token_centres"] for value in pair] == pytest.approx([0.25, 0.4, 0.375, 0.625])
    assert summary["token_areas"] == pytest.approx([0.2, 0.0])
    assert summary["token_norms"] == [5.0, 0.0]
    assert [value for pair in summary["token_regions"] for value in pair] == pytest.approx(regions.flatten().tolist())


def test_map_token_has_the_mean_position_and_effective_area_of_its_map():
    """A map that is uniform over k of N pixels has the area k / N, whatever its sum."""
    maps = torch.zeros(2, 3, 2, 4)
    maps[0, 0] = 0.125  # all pixels
    maps[0, 1, 1, 3] = 0.5  # the lower right pixel
    maps[0, 2, :, :2] = 7.0  # the left half
    trace = AssignmentTrace(maps.flatten(2), (2, 4), tokens=torch.ones(2, 3, 4))
    first, second = summarize_tokens(trace)
    assert [value for pair in first["token_centres"] for value in pair] == pytest.approx(
        [0.5, 0.5, 0.875, 0.75, 0.25, 0.5]
    )
    assert first["token_areas"] == pytest.approx([1, 1 / 8, 1 / 2])
    assert first["token_norms"] == [2.0, 2.0, 2.0]
    assert first["token_regions"] is None
    assert len(second["token_areas"]) == 3


@pytest.mark.parametrize("name", NANOS)
def test_tokens_of_every_family_are_those_of_the_last_grouping_step(name):
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=3).eval()
    predictor = RowPredictor(model, "classify", PredictOptions(size=64), tokens=True)
    samples = [predictor.read(path) for path in list(photo_paths().values())[:2]]
    rows = predictor(samples)
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.zeros(1, 3, 64, 64))
    for row in rows:
        lengths = {key: len(row.values[key]) for key in COLUMNS[:3]}
        assert set(lengths.values()) == {num_tokens(traces[-1])}
        centres = torch.tensor(row.values["token_centres"])
        assert centres.min() > -0.5
        assert centres.max() < 1.5  # regions may extend beyond the image
        assert (row.values["token_regions"] is not None) == name.startswith("sparseformer")
        assert set(row.values) <= set(predictor.schema.names)
    assert rows[0].values["token_norms"] != rows[1].values["token_norms"]


def test_tokens_are_refused_where_an_image_has_several_passes():
    with pytest.raises(ValueError, match="got task segment"):
        check_tokens("segment", PredictOptions())
    with pytest.raises(ValueError, match="got flip"):
        check_tokens("classify", PredictOptions(flip=True))
    check_tokens("embed", PredictOptions())


def test_image_that_the_model_refuses_is_an_error_of_its_row():
    class Picky(torch.nn.Module):
        num_classes = 2

        def forward(self, images):
            if images.amin((1, 2, 3)).min() < -1:
                raise RuntimeError("too\ndark")
            return images.mean((2, 3))[:, :2]

    predictor = RowPredictor(Picky(), "classify", PredictOptions(size=8, top=1))
    bright, dark = (torch.full((3, 8, 8), value, dtype=torch.uint8) for value in (255, 0))
    samples = [predictor.read(image) for image in (bright, dark, bright)]
    first, second, third = predictor(samples)
    assert isinstance(second, Unreadable)
    assert second.error == "image: too dark"
    assert first.values == third.values
