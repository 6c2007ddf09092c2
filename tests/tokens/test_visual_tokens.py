"""Visual tokens against their equations, written as loops, and properties of every tokenizer."""

from itertools import pairwise
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.tokens.visual_tokens import (
    TOKENIZERS,
    FilterTokenizer,
    KeepTokenizer,
    KMeansTokenizer,
    PoolTokenizer,
    RecurrentTokenizer,
    RepeatedTokenizer,
    cell_weights,
    kmeans,
    pixel_groups,
    token_grid,
)
from tests import slow

B, C, D, M, H, W = 2, 10, 12, 4, 3, 5


def map_of(dim=C, seed=1, height=H, width=W, batch=B):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, height, width, dtype=torch.float64, generator=generator)


def tokens_of(dim=D, count=M, seed=2):
    return torch.randn(B, count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def be_identity(*layers):
    for layer in layers:
        out, dim = layer.weight.shape
        layer.weight.data.copy_(torch.eye(dim, dtype=layer.weight.dtype).repeat(out // dim, 1))


def slow_token_map(pooled, layer):
    return slow.linear_norm(slow.norm(pooled, layer.norm), layer.fc)


# Eq. 1: filters


@pytest.mark.shows("VT-01", "VT-02")
def test_filter_tokenizer_matches_eq_1():
    """T = softmax_HW(X W_A)ᵀ X."""
    tokenizer = slow.randomise(FilterTokenizer(C, C, M, scale=False, norm=False))
    be_identity(tokenizer.to_token.fc.linear)
    expected, assignments = [], []
    for image in map_of():
        pixels = slow.rows_of(image)
        scores = slow.linear(pixels, tokenizer.to_score)  # X W_A, (N, M)
        attention = [slow.softmax([scores[p][m] for p in range(H * W)]) for m in range(M)]  # over HW, for every token
        expected.append(
            [[sum(attention[m][p] * pixels[p][c] for p in range(H * W)) for c in range(C)] for m in range(M)]
        )
        assignments.append(attention)
    tokens, assignment = tokenizer(map_of())
    slow.agree(tokens, expected)
    slow.agree(assignment, assignments)


@pytest.mark.shows("VT-05", "VTR-02", "VTR-03")
@pytest.mark.parametrize("value_groups", [0, 1, 5])
def test_filter_tokenizer_scales_scores_and_normalises_tokens(value_groups):
    """Scores / √C, values if any, then norm, linear map to the tokens' width, norm."""
    tokenizer = slow.randomise(FilterTokenizer(C, D, M, value_groups))
    expected = []
    for image in map_of():
        pixels = slow.rows_of(image)
        scores = slow.linear(pixels, tokenizer.to_score)
        weights = [slow.softmax([row[m] / sqrt(C) for row in scores]) for m in range(M)]
        expected.append(
            slow_token_map(slow.mix(weights, slow.linear_norm(pixels, tokenizer.to_value)), tokenizer.to_token)
        )
    slow.agree(tokenizer(map_of())[0], expected)


# Eq. 2: recurrent


@pytest.mark.shows("VT-06")
def test_recurrent_tokenizer_matches_eq_2():
    """W_R = T_in W_{T→R}, T = softmax_HW(X W_Rᵀ)ᵀ X; every weight but W_{T→R} is the identity."""
    tokenizer = RecurrentTokenizer(C, C, num_heads=1, keep_half=False, scale=False, norm=False)
    slow.randomise(tokenizer)
    be_identity(tokenizer.to_key_value.linear, tokenizer.to_token.fc.linear)
    previous, expected = tokens_of(C), []
    for image, before in zip(map_of(), previous.tolist(), strict=True):
        pixels, filters = slow.rows_of(image), slow.linear(before, tokenizer.to_query.linear)
        attention = [slow.softmax([slow.dot(pixel, w) for pixel in pixels]) for w in filters]
        expected.append(
            [[sum(attention[m][p] * pixels[p][c] for p in range(H * W)) for c in range(C)] for m in range(M)]
        )
    slow.agree(tokenizer(map_of(), previous)[0], expected)


@pytest.mark.shows("VTR-03", "VTR-04")
@pytest.mark.parametrize(("dim", "heads"), [(16, 4), (128, 4)])  # one group, and two groups of 64 channels
@pytest.mark.parametrize("keep_half", [True, False])
def test_recurrent_tokenizer_replaces_half_with_heads_and_groups(dim, heads, keep_half):
    """The first half of the tokens are queries; their results follow the unchanged second half."""
    tokenizer = slow.randomise(RecurrentTokenizer(dim, D, heads, keep_half))
    assert getattr(tokenizer.to_key_value.linear, "groups", 1) == dim // 64 or dim < 64
    features, previous, expected = map_of(dim), tokens_of(), []
    for image, before in zip(features, previous.tolist(), strict=True):
        query_tokens = before[: M // 2] if keep_half else before
        query = slow.linear_norm(query_tokens, tokenizer.to_query)
        key, value = slow.deal(slow.linear_norm(slow.rows_of(image), tokenizer.to_key_value), heads)
        pooled = slow.attend_in_heads(query, key, value, heads)
        expected.append(before[len(query_tokens) :] + slow_token_map(pooled, tokenizer.to_token))
    slow.agree(tokenizer(features, previous)[0], expected)


@pytest.mark.shows("VT-04")
def test_recurrent_assignment_depends_on_previous_tokens():
    features = map_of(16)
    recurrent = slow.randomise(RecurrentTokenizer(16, D, 4, keep_half=False))
    filters = slow.randomise(FilterTokenizer(16, D, M))
    one, other = tokens_of(seed=5), tokens_of(seed=6)

    def assignment(tokenizer, tokens):
        return tokenizer.trace((features, tokens), tokenizer(features, tokens)).assignment

    assert torch.equal(assignment(filters, one), assignment(filters, other))
    assert (assignment(recurrent, one) - assignment(recurrent, other)).abs().max() > 1e-2


@pytest.mark.shows("VT-07")
@pytest.mark.parametrize("tokenizer", [RecurrentTokenizer(C, D, 1), RepeatedTokenizer(nn.Identity()), KeepTokenizer()])
def test_later_tokenizers_without_previous_tokens_raise(tokenizer):
    with pytest.raises(ValueError, match="of a previous module, got None"):
        tokenizer(map_of().float())


@pytest.mark.shows("VT-45")
def test_repeated_tokenizer_appends_to_half_of_the_previous_tokens():
    inner = slow.randomise(FilterTokenizer(C, D, M))
    tokens, assignment = RepeatedTokenizer(inner)(map_of(), tokens_of(count=6))
    assert torch.equal(tokens[:, :3], tokens_of(count=6)[:, 3:])
    assert torch.equal(tokens[:, 3:], inner(map_of())[0])
    assert torch.equal(assignment, inner(map_of())[1])


# Eq. 6: clusters


def listing_1(pixels, seeds, iterations):
    """Listing 1 line by line, made to run: ties go to the first centroid, an empty cluster does not move."""

    def unit(row):
        length = sqrt(sum(value * value for value in row))
        return [value / length for value in row]

    pixels, centroids = [unit(row) for row in pixels], [unit(row) for row in seeds]
    for _ in range(iterations):
        clusters = [[] for _ in centroids]
        for pixel in pixels:
            distances = [sqrt(sum((x - u) ** 2 for x, u in zip(pixel, c, strict=True))) for c in centroids]
            clusters[distances.index(min(distances))].append(pixel)
        for m, members in enumerate(clusters):
            if members:
                centroids[m] = unit([sum(column) / len(members) for column in zip(*members, strict=True)])
    return centroids


@pytest.mark.shows("VT-10", "VT-11")
@pytest.mark.parametrize("iterations", [0, 1, 4])
def test_kmeans_tokenizer_matches_eq_6_with_listing_1(iterations):
    """W_K = KMEANS(X), T = softmax_HW(X W_K)ᵀ X, then the map to the tokens' width."""
    tokenizer = slow.randomise(KMeansTokenizer(C, D, M, iterations))
    expected = []
    for image in map_of():
        pixels, seeds = slow.rows_of(image), slow.rows_of(F.adaptive_avg_pool2d(image, (2, 2)))
        filters = listing_1(pixels, seeds, iterations)
        attention = [slow.softmax([slow.dot(pixel, w) for pixel in pixels]) for w in filters]
        expected.append(slow_token_map(slow.mix(attention, pixels), tokenizer.to_token))
    slow.agree(tokenizer(map_of())[0], expected)


vectors = st.integers(0, 2**31)


@pytest.mark.shows("VT-11")
@given(seed=vectors, count=st.integers(1, 7), pixels=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_kmeans_matches_listing_1(seed, count, pixels):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(1, pixels, 3, dtype=torch.float64, generator=generator)
    seeds = torch.randn(1, count, 3, dtype=torch.float64, generator=generator)
    slow.agree(kmeans(points, seeds, 5), [listing_1(points[0].tolist(), seeds[0].tolist(), 5)])


@pytest.mark.shows("VT-14")
@given(seed=vectors)
@settings(max_examples=25, deadline=None)
def test_kmeans_centroids_are_unit_vectors_of_rising_objective(seed):
    """The sum of cosines does not fall, pixel order has no effect, and a second run is equal."""
    generator = torch.Generator().manual_seed(seed)
    points = F.normalize(torch.randn(2, 30, 4, dtype=torch.float64, generator=generator), dim=-1)
    seeds = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    objective = []
    for iterations in range(6):
        centroids = kmeans(points, seeds, iterations)
        torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(2, 5, dtype=torch.float64))
        objective.append((points @ centroids.transpose(1, 2)).amax(-1).sum(-1))  # cosines with the nearest
    assert all((later >= earlier - 1e-12).all() for earlier, later in pairwise(objective))
    order = torch.randperm(30, generator=generator)
    torch.testing.assert_close(kmeans(points[:, order], seeds, 6), kmeans(points, seeds, 6))
    assert torch.equal(kmeans(points, seeds, 6), kmeans(points, seeds, 6))


@pytest.mark.shows("VT-14")
def test_kmeans_recovers_separated_clusters():
    """Groups with different directions are recovered exactly, for pixels of any length."""
    centres = torch.eye(4, 8, dtype=torch.float64)
    noise = 0.05 * torch.randn(1, 4, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points = (centres[:, None] + noise).flatten(1, 2) * torch.linspace(0.1, 9, 80, dtype=torch.float64)[:, None]
    seeds = points[:, [7, 27, 47, 67]]
    centroids = kmeans(points, seeds, 3)
    expected = F.normalize(F.normalize(points, dim=-1).unflatten(1, (4, 20)).mean(2), dim=-1)
    torch.testing.assert_close(centroids, expected)


@pytest.mark.shows("VT-12")
def test_kmeans_is_finite_for_empty_clusters_and_constant_features():
    """A centroid without pixels does not move; zero pixels have no direction."""
    points = torch.tensor([[[1.0, 0.0], [1.0, 0.1]]], dtype=torch.float64)
    seeds = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, -2.0]]], dtype=torch.float64)
    centroids = kmeans(points, seeds, 3)
    assert centroids.isfinite().all()
    torch.testing.assert_close(centroids[:, 1:], F.normalize(seeds[:, 1:], dim=-1))
    tokenizer = KMeansTokenizer(C, D, M).double()
    for features in (torch.zeros_like(map_of()), torch.ones_like(map_of())):
        features.requires_grad_()
        tokens, assignment = tokenizer(features)
        tokens.square().sum().backward()
        assert tokens.isfinite().all()
        assert features.grad.isfinite().all()
        torch.testing.assert_close(assignment, torch.full_like(assignment, 1 / (H * W)))
    assert kmeans(torch.zeros(1, 6, 8).half(), torch.zeros(1, 4, 8).half(), 3).isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Stores the number of elements of the largest tensor that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_kmeans_allocates_no_distances_per_channel():
    """Listing 1 allocates (N, M, C); here the largest tensor is that of the pixels."""
    pixels, seeds = torch.randn(1, 196, 64), torch.randn(1, 16, 64)
    with LargestTensor() as largest:
        kmeans(pixels, seeds, 3)
    assert largest.numel == 196 * 64


@pytest.mark.shows("VT-13")
def test_kmeans_centroids_are_detached():
    """Gradients reach the pixels through scores and mean, as if the centroids were constants."""
    tokenizer, features = slow.randomise(KMeansTokenizer(C, D, M)), map_of().requires_grad_()
    (gradient,) = torch.autograd.grad(tokenizer(features)[0].sum(), features)
    pixels = features.flatten(2).transpose(1, 2)
    seeds = F.adaptive_avg_pool2d(features, (2, 2)).flatten(2).transpose(1, 2)
    centroids = kmeans(pixels, seeds, 10).detach()
    tokens = tokenizer.to_token((pixels @ centroids.transpose(1, 2)).softmax(1).transpose(1, 2) @ pixels)
    torch.testing.assert_close(gradient, torch.autograd.grad(tokens.sum(), features)[0])


# Pooling


@pytest.mark.shows("VT-09")
@given(height=st.integers(1, 20), width=st.integers(1, 20), count=st.sampled_from([1, 2, 4, 6, 16, 20]))
@settings(max_examples=30, deadline=None)
def test_cell_weights_match_adaptive_average_pooling(height, width, count):
    features = map_of(3, height=height, width=width)
    weights = cell_weights(features, token_grid(count))
    expected = F.adaptive_avg_pool2d(features, token_grid(count)).flatten(2)
    torch.testing.assert_close(features.flatten(2) @ weights.t(), expected)


@pytest.mark.shows("VT-09")
def test_pool_tokenizer_averages_cells():
    tokenizer, expected = slow.randomise(PoolTokenizer(C, D, 6)), []
    for image in map_of():
        pixels, pooled = slow.rows_of(image), []
        for row in range(2):
            for column in range(3):
                ys = range(row * H // 2, -(-(row + 1) * H // 2))
                xs = range(column * W // 3, -(-(column + 1) * W // 3))
                cell = [pixels[y * W + x] for y in ys for x in xs]
                pooled.append([sum(values) / len(cell) for values in zip(*cell, strict=True)])
        expected.append(slow_token_map(pooled, tokenizer.to_token))
    slow.agree(tokenizer(map_of())[0], expected)


@pytest.mark.shows("VT-09")
def test_token_grid_is_as_square_as_possible():
    assert [token_grid(n) for n in (1, 2, 3, 8, 12, 16, 32, 64)] == [
        *((1, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 4), (4, 8), (8, 8))
    ]
    with pytest.raises(ValueError, match="with factors, got 13"):
        token_grid(13)


@pytest.mark.shows("VTR-04", "VTR-13")
def test_pixel_groups_have_64_channels_and_divide_heads():
    assert [pixel_groups(dim, 16) for dim in (32, 256, 512, 1024, 2048)] == [1, 4, 8, 16, 16]
    assert pixel_groups(192, 8) == 2  # three groups would cut heads
    with pytest.raises(ValueError, match="divisible by num_heads \\(3\\)"):
        RecurrentTokenizer(16, D, 3)


# Every tokenizer


def built(name, dim=16):
    if name == "recurrent":
        return slow.randomise(RecurrentTokenizer(dim, D, 4, keep_half=False))
    return slow.randomise(TOKENIZERS[name](dim, D, M))


@pytest.mark.parametrize("name", ["filter", "clustering", "pooling", "recurrent"])
class TestEveryTokenizer:
    def assignment(self, tokenizer, features):
        output = tokenizer(features, tokens_of())
        return output[0], tokenizer.trace((features, tokens_of()), output)

    @pytest.mark.shows("VT-01", "VT-03")
    def test_tokens_are_convex_combinations_of_pixels(self, name):
        """Weights are not negative and sum to one over the pixels; maps of the trace have the size of the features."""
        tokens, trace = self.assignment(built(name), map_of(16))
        assert trace.assignment.min() >= 0
        torch.testing.assert_close(trace.assignment.sum(-1), torch.ones(B, M, dtype=torch.float64))
        assert trace.maps().shape == (B, M, H, W)
        assert torch.equal(trace.tokens, tokens)

    def test_trace_assignment_gives_the_tokens(self, name):
        """Averaging the pixels with it gives the tokens (one head, and no map of values, where there are some)."""
        tokenizer = built(name)
        if name == "recurrent":
            tokenizer = slow.randomise(RecurrentTokenizer(16, D, 1, keep_half=False, norm=False))
            be_identity(tokenizer.to_key_value.linear)
        tokens, trace = self.assignment(tokenizer, map_of(16))
        pooled = trace.assignment @ map_of(16).flatten(2).transpose(1, 2)
        torch.testing.assert_close(tokenizer.to_token(pooled), tokens)

    @pytest.mark.shows("VT-03")
    def test_constant_features_give_equal_tokens(self, name):
        tokens, _ = self.assignment(built(name), map_of(16)[:, :, :1, :1].expand(-1, -1, H, W).contiguous())
        torch.testing.assert_close(tokens, tokens[:, :1].expand_as(tokens))

    @pytest.mark.shows("VT-03")
    def test_pixel_order_matters_only_with_pooling(self, name):
        order = torch.randperm(H * W, generator=torch.Generator().manual_seed(0))
        features, tokenizer = map_of(16), built(name)
        shuffled = features.flatten(2)[:, :, order].unflatten(2, (H, W))
        same = torch.allclose(self.assignment(tokenizer, features)[0], self.assignment(tokenizer, shuffled)[0])
        assert same == (name in ("filter", "recurrent"))

    def test_batch_equals_single_images(self, name):
        tokenizer, features = built(name), map_of(16)
        alone = [tokenizer(image[None], before[None])[0] for image, before in zip(features, tokens_of(), strict=True)]
        torch.testing.assert_close(tokenizer(features, tokens_of())[0], torch.cat(alone))
