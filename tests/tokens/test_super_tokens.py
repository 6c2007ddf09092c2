"""Super tokens against their equations: dense, sparse, padded, at the border, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.models.svit import SuperTokenAttention
from saccade.tokens.super_tokens import SuperTokenizer, from_cells, spread, to_cells
from tests.tokens.slow_super_tokens import slow_attention

sizes = st.integers(1, 21)


def map_of(height, width, dim=6, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, height, width, generator=generator, dtype=torch.float64)


@given(height=sizes, width=sizes, cell=st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_cells_are_the_map_again(height, width, cell):
    features = map_of(height, width)
    assert torch.equal(from_cells(to_cells(features, cell), cell, height, width), features)


@given(height=sizes, width=sizes, cell=st.integers(2, 5), iterations=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_equals_unfold_and_fold_at_any_size(height, width, cell, iterations, seed):
    torch.manual_seed(seed)
    module = SuperTokenAttention(8, 2, SuperTokenizer(cell, iterations)).double()
    features = map_of(height, width, 8, seed=seed).requires_grad_()
    fast, slow = module(features), slow_attention(module, features)
    torch.testing.assert_close(fast, slow)
    weight = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), [features, *module.parameters()]),
        torch.autograd.grad((slow * weight).sum(), [features, *module.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mask_border", [False, True])
def test_sparse_equals_dense_masked_to_the_neighbourhood(mask_border):
    """SVIT-08, SVIT-09: every pixel against every token, written out from Eq. 5 and 6."""
    cell, (rows, columns), features = 3, (3, 4), map_of(9, 12)
    tokens, association = SuperTokenizer(cell, 1, mask_border)(features)
    pixels = features.permute(0, 2, 3, 1)
    means = pixels.reshape(2, rows, cell, columns, cell, 6).mean((2, 4))
    dense = torch.zeros(2, 9, 12, rows, columns, dtype=torch.float64)
    for y in range(9):
        for x in range(12):
            scores, inside = [], []
            for i in range(y // cell - 1, y // cell + 2):
                for j in range(x // cell - 1, x // cell + 2):
                    there = 0 <= i < rows and 0 <= j < columns
                    score = (pixels[:, y, x] * means[:, i, j]).sum(-1) * 6**-0.5 if there else torch.zeros(2)
                    if there or not mask_border:
                        scores.append(score.double())
                        inside.append((i, j) if there else None)
            for share, place in zip(torch.stack(scores).softmax(0), inside, strict=True):
                if place:
                    dense[:, y, x, place[0], place[1]] = share
    expected = torch.einsum("byxij,byxc->bijc", dense, pixels) / dense.sum((1, 2))[..., None]
    torch.testing.assert_close(tokens, expected)
    back = torch.einsum("byxij,bijc->bcyx", dense, tokens)
    torch.testing.assert_close(spread(tokens, association, cell, 9, 12), back)


def test_maps_show_what_the_model_does_even_at_the_border():
    tokenizer, features = SuperTokenizer(4), map_of(10, 13)
    output = tokenizer(features)
    trace = tokenizer.trace((features,), output)
    maps = trace.maps()  # (B, M, H, W)
    assert maps.shape == (2, 3 * 4, 10, 13)
    torch.testing.assert_close(
        torch.einsum("bmc,bmyx->bcyx", trace.tokens, maps), spread(output[0], output[1], 4, 10, 13)
    )
    shares = maps.sum(1)
    torch.testing.assert_close(shares[:, 4:8, 4:8], torch.ones(2, 4, 4, dtype=torch.float64))  # nine neighbours
    assert (shares[:, 0, 0] < 0.99).all()  # five of them outside: their share is lost
    own = maps.view(2, 3, 4, 10, 13)
    assert own[0, 0, 0, :4, :4].min() > 0
    assert own[0, 0, 0, 8:, :].max() == 0  # two cells away


def test_masked_border_loses_nothing():
    tokenizer, features = SuperTokenizer(4, mask_border=True), map_of(8, 12)
    shares = tokenizer.trace((features,), tokenizer(features)).maps().sum(1)
    torch.testing.assert_close(shares, torch.ones_like(shares))


def test_attention_is_association_times_attention_times_association():
    """SVIT-16 (Eqs. 14-15): the sparse module is a dense matrix over pixels, applied to the values."""
    module = SuperTokenAttention(6, 1, SuperTokenizer(2)).double()
    module.attention.proj.weight.data = torch.eye(6, dtype=torch.float64)
    module.attention.proj.bias.data.zero_()
    module.attention.qkv.bias.data.zero_()
    features = map_of(4, 6, batch=1)
    trace = module.tokenizer.trace((features,), module.tokenizer(features))
    association = trace.maps().flatten(2)[0].T  # (N, M)
    pixels = features.flatten(2)[0].T  # (N, C)
    query, key, value = module.attention.qkv.weight.chunk(3)
    tokens = trace.tokens[0]
    attention = (tokens @ query.T @ (tokens @ key.T).T / 6**0.5).softmax(-1)
    dense = association @ attention @ (association / association.sum(0)).T  # (N, N)
    torch.testing.assert_close(module(features).flatten(2)[0].T, dense @ pixels @ value.T)


def test_zero_iterations_are_the_cell_means_put_back():
    """SVIT-12."""
    features = map_of(4, 4, batch=1)
    tokenizer = SuperTokenizer(2, 0)
    tokens, association = tokenizer(features)
    means = torch.nn.functional.avg_pool2d(features, 2)
    torch.testing.assert_close(tokens.permute(0, 3, 1, 2), means)
    back = spread(tokens, association, 2, 4, 4)
    torch.testing.assert_close(back, means.repeat_interleave(2, 2).repeat_interleave(2, 3))
    own = tokenizer.trace((features,), (tokens, association)).maps()
    assert torch.equal(own.sum(1), torch.ones(1, 4, 4, dtype=torch.float64))


def test_flat_colour_areas_become_their_own_tokens():
    """A map of two vivid halves: after sampling, each token carries the colour of its side only."""
    features = torch.zeros(1, 2, 8, 16)
    features[:, 0, :, :8] = 9
    features[:, 1, :, 8:] = 9
    tokens, _ = SuperTokenizer(4, 2)(features)
    assert tokens[0, :, :2, 0].min() > 0.99 * 9
    assert tokens[0, :, :2, 1].max() < 0.01 * 9
