"""Location attention: the bias in closed form, and attention written out."""

import pytest
import torch

from saccade.tokens.locate import LocationAttention, locate, location_bias

HEIGHT, WIDTH = 6, 9


@pytest.fixture
def scene():
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(2, 5, 2, generator=generator, dtype=torch.float64) * 0.6
    regions = torch.cat([low, low + 0.1 + 0.3 * torch.rand(2, 5, 2, generator=generator, dtype=torch.float64)], -1)
    tokens = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    features = torch.randn(2, 4, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    return features, tokens, regions


@pytest.mark.shows("SF-72")
def test_bias_matches_the_closed_form(scene):
    _, _, regions = scene
    bias = location_bias(regions, HEIGHT, WIDTH)
    for b, (row, column), m in ((0, (0, 0), 0), (1, (5, 8), 4), (0, (2, 7), 3), (1, (3, 1), 2)):
        x0, y0, x1, y1 = regions[b, m].tolist()
        x, y = (column + 0.5) / WIDTH, (row + 0.5) / HEIGHT
        expected = -(((x - (x0 + x1) / 2) / (x1 - x0)) ** 2) - ((y - (y0 + y1) / 2) / (y1 - y0)) ** 2
        assert bias[b, row * WIDTH + column, m].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.shows("SF-72")
def test_bias_is_zero_at_the_centre_and_falls_slower_around_large_regions():
    centre = [(4 + 0.5) / WIDTH, (2 + 0.5) / HEIGHT]
    regions = torch.tensor([[[c - s / 2 for c in centre] + [c + s / 2 for c in centre] for s in (0.2, 0.8)]])
    bias = location_bias(regions, HEIGHT, WIDTH)[0]
    pixel = 2 * WIDTH + 4
    torch.testing.assert_close(bias[pixel], torch.zeros(2), atol=1e-10, rtol=0)
    other = torch.arange(HEIGHT * WIDTH) != pixel
    assert (bias[other] < 0).all()
    assert (bias[other, 1] > bias[other, 0]).all()


def test_bias_of_an_empty_region_is_finite():
    assert location_bias(torch.full((1, 1, 4), 0.5), HEIGHT, WIDTH).isfinite().all()


def test_a_pixel_takes_the_token_of_its_region():
    corners = torch.tensor([[0.0, 0.0, 0.2, 0.2], [0.8, 0.8, 1.0, 1.0]])[None]
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    dense = locate(tokens, corners, 16, 16)
    torch.testing.assert_close(dense[0, :, 0, 0], tokens[0, 0])
    torch.testing.assert_close(dense[0, :, -1, -1], tokens[0, 1])
    torch.testing.assert_close(dense[0].sum(0), torch.ones(16, 16))  # weights sum to 1 everywhere


@pytest.mark.shows("SF-71")
def test_attention_matches_softmax_with_location_bias(scene):
    features, tokens, regions = scene
    attention = LocationAttention(4, 8).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    query = attention.to_query(features.flatten(2).transpose(1, 2))
    scores = query @ attention.to_key(tokens).transpose(1, 2) / 8**0.5 + location_bias(regions, HEIGHT, WIDTH)
    expected = (scores.softmax(-1) @ attention.to_value(tokens)).transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))
    torch.testing.assert_close(attention(features, tokens, regions), expected)


def test_initial_attention_is_close_to_location_alone(scene):
    features, tokens, regions = scene
    dense = LocationAttention(4, 8).double()(features, tokens, regions)
    torch.testing.assert_close(dense, locate(tokens, regions, HEIGHT, WIDTH), atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_far_and_tiny_regions_are_finite_in_half_precision(dtype):
    regions = torch.tensor([[[5.0, 5.0, 5.001, 5.001], [-3.0, 0.0, -2.999, 0.001]]])
    tokens = torch.tensor([[[1.0] * 8, [2.0] * 8]]).to(dtype)
    dense = LocationAttention(4, 8).to(dtype)(torch.zeros(1, 4, 6, 6, dtype=dtype), tokens, regions)
    torch.testing.assert_close(dense[0, 0, 0, 0].float(), torch.tensor(2.0), atol=0.05, rtol=0)  # the nearer one
    assert dense.isfinite().all()
