"""Projection of visual tokens onto the pixels against VT Eq. 5, written as loops."""

import pytest
import torch

from saccade.tokens.projector import TokenProjector
from tests import slow

B, M, H, W = 2, 4, 3, 5


def draw(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.shows("VT-22", "VT-23")
def test_projector_matches_eq_5():
    """X + softmax_L((X W_Q)(T W_K)ᵀ) T: one width, one head, no scale, no norm."""
    layer = slow.randomise(TokenProjector(8, 8, 8, num_heads=1, scale=False, norm=False))
    features, tokens, expected = draw(B, 8, H, W), draw(B, M, 8, seed=2), []
    for image, one in zip(features, tokens.tolist(), strict=True):
        pixels = slow.rows_of(image)
        query, key = slow.linear(pixels, layer.to_query.linear), slow.linear(one, layer.to_key.linear)
        out = []
        for p, pixel in enumerate(pixels):
            weights = slow.softmax([slow.dot(query[p], key[m]) for m in range(M)])
            out.append([pixel[c] + sum(weights[m] * one[m][c] for m in range(M)) for c in range(8)])
        expected.append(out)
    slow.agree(layer(features, tokens).flatten(2).transpose(1, 2), expected)


@pytest.mark.shows("VT-23", "VTR-07")
@pytest.mark.parametrize(
    ("pixel_dim", "dim", "token_dim", "heads"), [(12, 16, 20, 4), (16, 16, 16, 2), (24, 128, 8, 4)]
)
def test_projector_matches_its_formula_with_heads_and_groups(pixel_dim, dim, token_dim, heads):
    layer = slow.randomise(TokenProjector(pixel_dim, dim, token_dim, heads))
    assert getattr(layer.to_query.linear, "groups", 1) == max(1, dim // 64)
    features, tokens, expected = draw(B, pixel_dim, H, W), draw(B, M, token_dim, seed=2), []
    for image, one in zip(features, tokens.tolist(), strict=True):
        pixels = slow.linear_norm(slow.rows_of(image), layer.widen)
        query, key = slow.linear_norm(pixels, layer.to_query), slow.linear_norm(one, layer.to_key)
        values = slow.linear(one, layer.to_value) if token_dim != dim else one
        attended = slow.attend_in_heads(query, key, values, heads)
        expected.append(slow.add(pixels, slow.norm(attended, layer.norm)))
    slow.agree(layer(features, tokens).flatten(2).transpose(1, 2), expected)


@pytest.mark.shows("VT-24")
def test_projector_adds_convex_combinations_of_tokens():
    """Equal tokens are added unchanged for any weights; zero tokens leave the features as they are; at any size."""
    layer = slow.randomise(TokenProjector(8, 8, 8, num_heads=2, norm=False))
    token = draw(B, 1, 8, seed=2)
    for height, width in ((1, 1), (3, 5), (7, 2)):
        features = draw(B, 8, height, width)
        output = layer(features, token.expand(-1, M, -1))
        torch.testing.assert_close(output, features + token.transpose(1, 2).unsqueeze(3))
        assert torch.equal(layer(features, torch.zeros(B, M, 8, dtype=torch.float64)), features)


@pytest.mark.shows("VTR-01")
def test_projector_starts_as_the_identity():
    layer, features = TokenProjector(16, 16, 32, 4).double().train(), draw(B, 16, H, W)
    torch.testing.assert_close(layer(features, draw(B, M, 32)), features)


def test_projector_output_is_channels_last():
    features = draw(B, 16, H, W).contiguous(memory_format=torch.channels_last)
    output = TokenProjector(16, 32, 8, 4).double()(features, draw(B, M, 8))
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_projector_rejects_indivisible_heads():
    with pytest.raises(ValueError, match="divisible by num_heads \\(3\\)"):
        TokenProjector(16, 16, 16, 3)
