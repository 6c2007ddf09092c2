"""Clusters against their equations: a distribution over pixels, a weighted mean, at any size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.layers.attention import CrossAttention
from saccade.tokens.clusters import (
    ClusterTokenizer,
    ConvClustering,
    LinearClustering,
    MlpClustering,
    SharedTokenizer,
    ToScore,
)

CLUSTERINGS = [ConvClustering, MlpClustering, LinearClustering]
sizes = st.integers(1, 13)


def map_of(height, width, dim=6, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, height, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@given(height=sizes, width=sizes, seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_every_cluster_is_a_distribution_over_the_pixels_at_any_size(clustering, height, width, seed):
    """PACA-05, PACA-08, PACA-15: the same weights serve every size; columns sum to 1 over positions."""
    torch.manual_seed(seed)
    tokenizer = ClusterTokenizer(6, clustering(6, 5)).double()
    tokens, assignment, scores = tokenizer(map_of(height, width, seed=seed))
    assert tokens.shape == (2, 5, 6)
    assert assignment.shape == scores.shape == (2, 5, height * width)
    assert assignment.min() >= 0
    torch.testing.assert_close(assignment.sum(-1), torch.ones(2, 5, dtype=torch.float64))


def test_tokens_are_eq_2_written_out():
    """Pixel by pixel, from given scores: softmax over pixels, weighted mean, LayerNorm (PACA-04)."""
    features, scores = map_of(3, 4), torch.randn(2, 5, 12, dtype=torch.float64)
    tokenizer = ClusterTokenizer(6).double()
    torch.nn.init.normal_(tokenizer.norm.weight)
    tokens, _, _ = tokenizer(features, scores)
    for image in range(2):
        for cluster in range(5):
            weights = [scores[image, cluster, n].exp() for n in range(12)]
            total = sum(w * features[image, :, n // 4, n % 4] for n, w in enumerate(weights)) / sum(weights)
            centred = total - total.mean()
            expected = centred / (centred.square().mean() + 1e-6).sqrt() * tokenizer.norm.weight
            torch.testing.assert_close(tokens[image, cluster], expected)


def test_convolution_clustering_is_eqs_4_and_5():
    features, clustering = map_of(9, 7), ConvClustering(6, 5).double()
    hidden = F.gelu(F.conv2d(features, clustering.conv.weight, clustering.conv.bias, padding=3, groups=6))
    hidden = F.gelu(F.conv2d(hidden, clustering.mix.weight[:, :, None, None], clustering.mix.bias))
    expected = F.conv2d(hidden, clustering.to_score.weight[:, :, None, None])
    torch.testing.assert_close(clustering(features), expected.flatten(2))


def test_perceptron_clustering_is_eq_6():
    features, clustering = map_of(5, 4), MlpClustering(6, 5).double()
    assert clustering.fc.out_features == 24
    for n in range(20):
        pixel = features[:, :, n // 4, n % 4]
        torch.testing.assert_close(
            clustering(features)[:, :, n],
            F.linear(F.gelu(clustering.fc(pixel)), clustering.to_score.weight, clustering.to_score.bias),
        )


@pytest.mark.parametrize("bias", [True, False])
def test_scores_are_a_linear_layer_with_rows_per_cluster(bias):
    layer, pixels = ToScore(6, 5, bias=bias), torch.randn(2, 7, 6)
    scores = layer(pixels)
    torch.testing.assert_close(scores, F.linear(pixels, layer.weight, layer.bias).transpose(1, 2))
    assert scores.is_contiguous()


def test_equal_scores_give_the_mean_of_the_image():
    """PACA-16: clustering as global pooling."""
    features = map_of(4, 5)
    tokens, assignment, _ = ClusterTokenizer(6).double()(features, torch.zeros(2, 3, 20, dtype=torch.float64))
    mean = F.layer_norm(features.mean((2, 3)), (6,), eps=1e-6)
    torch.testing.assert_close(tokens, mean[:, None].expand(-1, 3, -1))
    assert (assignment == 1 / 20).all()


def test_planted_groups_are_found():
    """Four colours, four clusters that each look for one: a cluster is its colour's pixels, its token their mean."""
    colour = torch.randint(4, (8, 8), generator=torch.Generator().manual_seed(0))
    features = F.one_hot(colour, 4).permute(2, 0, 1)[None].double()
    clustering = LinearClustering(4, 4).double()
    clustering.to_score.weight.data = 60 * torch.eye(4, dtype=torch.float64)
    _, assignment, _ = ClusterTokenizer(4, clustering).double()(features)
    for cluster, weights in enumerate(assignment[0]):
        members = (colour == cluster).flatten()
        torch.testing.assert_close(weights[members], torch.full_like(weights[members], 1 / members.sum()))
        assert weights[~members].max() < 1e-20


@pytest.mark.parametrize(("clustering", "on_a_grid"), [(ConvClustering, True), (MlpClustering, False)])
def test_only_the_convolution_knows_the_grid(clustering, on_a_grid):
    """PACA-07: by perceptron, pixels are a set; shuffling them shuffles nothing else."""
    torch.manual_seed(0)
    tokenizer, features = ClusterTokenizer(6, clustering(6, 5)).double(), map_of(5, 4)
    order = torch.randperm(20)
    shuffled = features.flatten(2)[:, :, order].unflatten(2, (5, 4))
    same = torch.allclose(tokenizer(shuffled)[0], tokenizer(features)[0])
    assert same is not on_a_grid


def test_a_shared_assignment_groups_other_pixels_with_gradient():
    """PACA-10, PACA-17: later blocks reuse the weights on their own pixels, and teach the clustering through them."""
    clustering = MlpClustering(6, 5).double()
    first, later, features = ClusterTokenizer(6, clustering).double(), SharedTokenizer(6).double(), map_of(4, 4)
    _, assignment, _ = first(features)
    tokens, handed_on = later(features.square(), assignment)
    assert handed_on is assignment
    expected = F.layer_norm(assignment @ features.square().flatten(2).transpose(1, 2), (6,), eps=1e-6)
    torch.testing.assert_close(tokens, expected)
    attention = CrossAttention(6, 2).double()
    attention(features.flatten(2).transpose(1, 2), tokens).square().sum().backward()
    assert clustering.to_score.weight.grad.abs().max() > 0


def test_without_scores_or_assignment_the_tokenizers_say_what_they_need():
    with pytest.raises(ValueError, match="expected scores"):
        ClusterTokenizer(6)(map_of(2, 2))
    with pytest.raises(ValueError, match="expected assignment"):
        SharedTokenizer(6)(map_of(2, 2))


def test_the_trace_is_the_call():
    tokenizer, features = ClusterTokenizer(6, ConvClustering(6, 5)).double(), map_of(3, 4)
    output = tokenizer(features)
    trace = tokenizer.trace((features, None), output)
    assert trace.assignment is output[1]
    assert trace.scores is output[2]
    assert trace.maps().shape == (2, 5, 3, 4)
    assert torch.equal(trace.maps()[1, 2, 1, 3], trace.assignment[1, 2, 7])


def test_autocast_hands_on_half_precision():
    """The assignment is shared by up to 18 blocks; a float32 copy would be cast again in each."""
    tokenizer, features = ClusterTokenizer(16, ConvClustering(16, 5)), map_of(8, 8, 16).float()
    expected = tokenizer(features)[0]
    with torch.autocast("cpu", torch.bfloat16):
        tokens, assignment, _ = tokenizer(features)
    assert assignment.dtype == torch.bfloat16
    assert (assignment.float().sum(-1) - 1).abs().max() < 1e-2
    assert (tokens.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_attention_is_multi_head_attention_without_its_weights():
    attention, pixels, tokens = CrossAttention(12, 3).double(), torch.randn(2, 30, 12).double(), torch.randn(2, 5, 12)
    tokens = tokens.double()
    weight = torch.cat([attention.to_query.weight, attention.to_key_value.weight])
    bias = torch.cat([attention.to_query.bias, attention.to_key_value.bias])
    expected, _ = F.multi_head_attention_forward(
        pixels.transpose(0, 1), tokens.transpose(0, 1), tokens.transpose(0, 1), 12, 3, weight, bias, None, None, False,
        0.0, attention.proj.weight, attention.proj.bias,
    )  # fmt: skip
    torch.testing.assert_close(attention(pixels, tokens), expected.transpose(0, 1))


class Sizes(TorchDispatchMode):
    """Every shape that any operation of a forward pass writes."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(value, torch.Tensor):
                self.shapes.add(tuple(value.shape))
        return output


def square_shapes(side: int, **switches) -> list[tuple[int, ...]]:
    """Shapes in which the number of pixels of a stage stands twice."""
    model = saccade.create_model("paca_small", depths=(1, 1, 1, 1), **switches).eval()
    with torch.no_grad(), Sizes() as seen:
        model(torch.zeros(1, 3, side, side))
    pixels = [(side // stride) ** 2 for stride in (4, 8, 16, 32)]
    assert len(seen.shapes) > 20
    return [shape for shape in seen.shapes if any(shape.count(number) > 1 for number in pixels)]


def test_no_matrix_of_pixels_by_pixels_is_ever_made():
    """PACA-68, PACA-70, at 480 px: stage 1 has 14400 pixels, whose square would be 830 MB a head."""
    assert square_shapes(480) == []
    with sdpa_kernel(SDPBackend.MATH):  # plain attention, written out: the watcher does see such a matrix
        assert (1, 2, 576, 576) in square_shapes(96, clusters=(0, 0, 0, 0))
