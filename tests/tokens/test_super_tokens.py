"""Super tokens against the equations of the paper: dense, sparse, padded, at the border."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade.models.svit import SuperTokenAttention
from saccade.tokens.super_tokens import DenseSuperTokenizer, SuperTokenizer, from_cells, spread, to_cells
from tests.tokens.slow_super_tokens import slow_attention

sizes = st.integers(1, 21)


def random_features(height, width, dim=6, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, height, width, generator=generator, dtype=torch.float64)


@given(height=sizes, width=sizes, cell=st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_from_cells_inverts_to_cells(height, width, cell):
    features = random_features(height, width)
    assert torch.equal(from_cells(to_cells(features, cell), cell, height, width), features)


@pytest.mark.shows("SVIT-05", "SVIT-06", "SVIT-07", "SVIT-10", "SVIT-11", "SVIT-12")
@given(height=sizes, width=sizes, cell=st.integers(2, 5), iterations=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_attention_matches_unfold_and_fold_at_any_size(height, width, cell, iterations, seed):
    torch.manual_seed(seed)
    module = SuperTokenAttention(8, 2, SuperTokenizer(cell, iterations)).double()
    features = random_features(height, width, 8, seed=seed).requires_grad_()
    fast, slow = module(features), slow_attention(module, features)
    torch.testing.assert_close(fast, slow)
    weight = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), [features, *module.parameters()]),
        torch.autograd.grad((slow * weight).sum(), [features, *module.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.shows("SVIT-01", "SVIT-03", "SVIT-04", "SVIT-08", "SVIT-09", "SVIT-15")
@pytest.mark.parametrize("mask_border", [False, True])
def test_sparse_association_matches_dense_masked_to_the_neighbourhood(mask_border):
    """Every pixel with every token, written out from SViT Eqs. 5, 6 and 11."""
    cell, (rows, columns), features = 3, (3, 4), random_features(9, 12)
    tokens, association = SuperTokenizer(cell, 1, mask_border)(features)
    pixels = features.permute(0, 2, 3, 1)
    means = pixels.reshape(2, rows, cell, columns, cell, 6).mean((2, 4))
    dense = torch.zeros(2, 9, 12, rows, columns, dtype=torch.float64)
    for y in range(9):
        for x in range(12):
            scores, inside = [], []
            for i in range(y // cell - 1, y // cell + 2):
                for j in range(x // cell - 1, x // cell + 2):
                    valid = 0 <= i < rows and 0 <= j < columns
                    score = (pixels[:, y, x] * means[:, i, j]).sum(-1) * 6**-0.5 if valid else torch.zeros(2)
                    if valid or not mask_border:
                        scores.append(score.double())
                        inside.append((i, j) if valid else None)
            for weight, token in zip(torch.stack(scores).softmax(0), inside, strict=True):
                if token:
                    dense[:, y, x, token[0], token[1]] = weight
    expected = torch.einsum("byxij,byxc->bijc", dense, pixels) / dense.sum((1, 2))[..., None]
    torch.testing.assert_close(tokens, expected)
    expected = torch.einsum("byxij,bijc->bcyx", dense, tokens)
    torch.testing.assert_close(spread(tokens, association, cell, 9, 12), expected)


def test_maps_are_the_matrix_of_spread_even_at_the_border():
    tokenizer, features = SuperTokenizer(4), random_features(10, 13)
    output = tokenizer(features)
    trace = tokenizer.trace((features,), output)
    maps = trace.maps()  # (B, M, H, W)
    assert maps.shape == (2, 3 * 4, 10, 13)
    torch.testing.assert_close(
        torch.einsum("bmc,bmyx->bcyx", trace.tokens, maps), spread(output[0], output[1], 4, 10, 13)
    )
    total = maps.sum(1)
    torch.testing.assert_close(total[:, 4:8, 4:8], torch.ones(2, 4, 4, dtype=torch.float64))  # nine neighbours
    assert (total[:, 0, 0] < 0.99).all()  # five neighbours are outside, and their part is lost
    own = maps.view(2, 3, 4, 10, 13)
    assert own[0, 0, 0, :4, :4].min() > 0
    assert own[0, 0, 0, 8:, :].max() == 0  # two cells away


@pytest.mark.shows("SVIT-09")
def test_association_with_masked_border_sums_to_one():
    tokenizer, features = SuperTokenizer(4, mask_border=True), random_features(8, 12)
    total = tokenizer.trace((features,), tokenizer(features)).maps().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.shows("SVIT-14", "SVIT-16")
def test_attention_matches_the_dense_product_of_eqs_14_and_15():
    module = SuperTokenAttention(6, 1, SuperTokenizer(2)).double()
    module.attention.proj.weight.data = torch.eye(6, dtype=torch.float64)
    module.attention.proj.bias.data.zero_()
    module.attention.qkv.bias.data.zero_()
    features = random_features(4, 6, batch=1)
    trace = module.tokenizer.trace((features,), module.tokenizer(features))
    association = trace.maps().flatten(2)[0].T  # (N, M)
    pixels = features.flatten(2)[0].T  # (N, C)
    query, key, value = module.attention.qkv.weight.chunk(3)
    tokens = trace.tokens[0]
    attention = (tokens @ query.T @ (tokens @ key.T).T / 6**0.5).softmax(-1)
    dense = association @ attention @ (association / association.sum(0)).T  # (N, N)
    torch.testing.assert_close(module(features).flatten(2)[0].T, dense @ pixels @ value.T)


@pytest.mark.shows("SVIT-02", "SVIT-12")
def test_zero_iterations_upsample_the_cell_means():
    features = random_features(4, 4, batch=1)
    tokenizer = SuperTokenizer(2, 0)
    tokens, association = tokenizer(features)
    means = torch.nn.functional.avg_pool2d(features, 2)
    torch.testing.assert_close(tokens.permute(0, 3, 1, 2), means)
    upsampled = spread(tokens, association, 2, 4, 4)
    torch.testing.assert_close(upsampled, means.repeat_interleave(2, 2).repeat_interleave(2, 3))
    own = tokenizer.trace((features,), (tokens, association)).maps()
    assert torch.equal(own.sum(1), torch.ones(1, 4, 4, dtype=torch.float64))


def test_tokens_do_not_mix_two_flat_areas():
    """Features of two flat areas, left and right: after sampling, each token has the value of its side only."""
    features = torch.zeros(1, 2, 8, 16)
    features[:, 0, :, :8] = 9
    features[:, 1, :, 8:] = 9
    tokens, _ = SuperTokenizer(4, 2)(features)
    assert tokens[0, :, :2, 0].min() > 0.99 * 9
    assert tokens[0, :, :2, 1].max() < 0.01 * 9


# Dense association


@pytest.mark.shows("SVIT-63")
@pytest.mark.parametrize("iterations", [1, 2])
def test_dense_association_matches_eqs_5_6_and_11_for_every_pixel_and_token(iterations):
    features = random_features(4, 6)
    pixels = features.flatten(2).transpose(1, 2)  # (B, N, C)
    tokens = features.unflatten(3, (3, 2)).unflatten(2, (2, 2)).mean((3, 5)).flatten(2).transpose(1, 2)
    for _ in range(iterations):
        association = (pixels @ tokens.transpose(1, 2) / 6**0.5).softmax(2)  # Eq. 5
        tokens = (association / association.sum(1, keepdim=True)).transpose(1, 2) @ pixels  # Eq. 6
    tokenizer = DenseSuperTokenizer(2, iterations)
    output = tokenizer(features)
    torch.testing.assert_close(output[0].flatten(1, 2), tokens)
    torch.testing.assert_close(output[1], association)
    upsampled = tokenizer.spread(output[0], output[1], 4, 6)
    torch.testing.assert_close(upsampled.flatten(2).transpose(1, 2), association @ tokens)  # Eq. 11
    maps = tokenizer.trace((features,), output).maps()
    torch.testing.assert_close(maps.sum((2, 3)), torch.ones(2, 6, dtype=torch.float64))


@pytest.mark.shows("SVIT-63")
def test_dense_equals_sparse_where_every_cell_is_a_neighbour():
    """On 2x2 cells the nine neighbours, without those outside the map, are all tokens."""
    features = random_features(8, 8)
    sparse, dense = SuperTokenizer(4, 2, mask_border=True), DenseSuperTokenizer(4, 2)
    expected, association = sparse(features)
    tokens, weights, _ = dense(features)
    torch.testing.assert_close(tokens, expected)
    torch.testing.assert_close(dense.spread(tokens, weights, 8, 8), sparse.spread(expected, association, 8, 8))


@pytest.mark.shows("SVIT-63")
def test_ssn_association_is_the_exponential_of_squared_distances():
    """SViT Eq. 4; columns are normalised for the tokens, rows to put them back. No overflow far from every token."""
    features = random_features(4, 4)
    pixels = features.flatten(2).transpose(1, 2)
    tokens = features.unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean((3, 5)).flatten(2).transpose(1, 2)
    similarity = (-(pixels.unsqueeze(2) - tokens.unsqueeze(1)).square().sum(3)).exp()  # Eq. 4
    updated, association, _ = DenseSuperTokenizer(2, ssn=True)(features)
    expected = (similarity / similarity.sum(1, keepdim=True)).transpose(1, 2) @ pixels
    torch.testing.assert_close(updated.flatten(1, 2), expected)
    torch.testing.assert_close(association, similarity / similarity.sum(2, keepdim=True))
    assert DenseSuperTokenizer(2, ssn=True)(100 * features.float())[0].isfinite().all()


@pytest.mark.shows("SVIT-63")
def test_association_is_an_option_of_the_models():
    torch.manual_seed(0)
    images, logits = torch.randn(1, 3, 64, 64), {}
    state_dict = saccade.create_model("svit_nano", num_classes=3).state_dict()
    for kind in ("sparse", "dense", "ssn"):
        model = saccade.create_model("svit_nano", num_classes=3, association=kind).eval()
        saccade.load_checkpoint(model, state_dict)
        with torch.no_grad():
            logits[kind] = model(images)
    assert len({tuple(value.flatten().tolist()) for value in logits.values()}) == 3
    with pytest.raises(ValueError, match="association must be one of sparse, dense, ssn; got 'all'"):
        saccade.create_model("svit_nano", association="all")
    with pytest.raises(ValueError, match="iterations >= 1, got 0"):
        saccade.create_model("svit_nano", association="dense", iterations=0)
    with pytest.raises(ValueError, match="mask_border is for association='sparse'"):
        saccade.create_model("svit_nano", association="ssn", mask_border=True)
