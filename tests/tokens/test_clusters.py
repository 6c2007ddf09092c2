"""Clusters against the equations of the paper."""

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
    PooledTokenizer,
    SharedTokenizer,
    StridedTokenizer,
    TokenToClusterAttention,
    ToScore,
)

CLUSTERINGS = [ConvClustering, MlpClustering, LinearClustering]
sizes = st.integers(1, 13)


def random_features(height, width, dim=6, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, height, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@pytest.mark.shows("PACA-05", "PACA-08", "PACA-15", "PACA-73")
@given(height=sizes, width=sizes, seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_every_cluster_is_a_distribution_over_the_pixels_at_any_size(clustering, height, width, seed):
    """The same weights serve every size; an assignment sums to 1 over the pixels."""
    torch.manual_seed(seed)
    tokenizer = ClusterTokenizer(6, clustering(6, 5)).double()
    tokens, assignment, scores = tokenizer(random_features(height, width, seed=seed))
    assert tokens.shape == (2, 5, 6)
    assert assignment.shape == scores.shape == (2, 5, height * width)
    assert assignment.min() >= 0
    torch.testing.assert_close(assignment.sum(-1), torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.shows("PACA-04")
def test_tokens_match_eq_2_written_out():
    """Pixel by pixel, from given scores: softmax over pixels, weighted mean, LayerNorm."""
    features, scores = random_features(3, 4), torch.randn(2, 5, 12, dtype=torch.float64)
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


@pytest.mark.shows("PACA-06")
def test_conv_clustering_matches_eqs_4_and_5():
    features, clustering = random_features(9, 7), ConvClustering(6, 5).double()
    hidden = F.gelu(F.conv2d(features, clustering.conv.weight, clustering.conv.bias, padding=3, groups=6))
    hidden = F.gelu(F.conv2d(hidden, clustering.mix.weight[:, :, None, None], clustering.mix.bias))
    expected = F.conv2d(hidden, clustering.to_score.weight[:, :, None, None])
    torch.testing.assert_close(clustering(features), expected.flatten(2))


@pytest.mark.shows("PACA-07")
def test_mlp_clustering_matches_eq_6():
    features, clustering = random_features(5, 4), MlpClustering(6, 5).double()
    assert clustering.fc.out_features == 24
    for n in range(20):
        pixel = features[:, :, n // 4, n % 4]
        torch.testing.assert_close(
            clustering(features)[:, :, n],
            F.linear(F.gelu(clustering.fc(pixel)), clustering.to_score.weight, clustering.to_score.bias),
        )


@pytest.mark.parametrize("bias", [True, False])
def test_to_score_matches_a_linear_layer_with_a_contiguous_row_per_cluster(bias):
    layer, pixels = ToScore(6, 5, bias=bias), torch.randn(2, 7, 6)
    scores = layer(pixels)
    torch.testing.assert_close(scores, F.linear(pixels, layer.weight, layer.bias).transpose(1, 2))
    assert scores.is_contiguous()


@pytest.mark.shows("PACA-16")
def test_equal_scores_give_the_mean_of_the_image():
    features = random_features(4, 5)
    tokens, assignment, _ = ClusterTokenizer(6).double()(features, torch.zeros(2, 3, 20, dtype=torch.float64))
    mean = F.layer_norm(features.mean((2, 3)), (6,), eps=1e-6)
    torch.testing.assert_close(tokens, mean[:, None].expand(-1, 3, -1))
    assert (assignment == 1 / 20).all()


@pytest.mark.shows("PACA-73")
def test_clusters_of_four_colours_are_their_pixels():
    """Four colours, four clusters that each score one of them: an assignment is uniform over the colour's pixels."""
    colour = torch.randint(4, (8, 8), generator=torch.Generator().manual_seed(0))
    features = F.one_hot(colour, 4).permute(2, 0, 1)[None].double()
    clustering = LinearClustering(4, 4).double()
    clustering.to_score.weight.data = 60 * torch.eye(4, dtype=torch.float64)
    _, assignment, _ = ClusterTokenizer(4, clustering).double()(features)
    for cluster, weights in enumerate(assignment[0]):
        members = (colour == cluster).flatten()
        torch.testing.assert_close(weights[members], torch.full_like(weights[members], 1 / members.sum()))
        assert weights[~members].max() < 1e-20


@pytest.mark.shows("PACA-07")
@pytest.mark.parametrize(("clustering", "on_a_grid"), [(ConvClustering, True), (MlpClustering, False)])
def test_only_conv_clustering_depends_on_the_grid(clustering, on_a_grid):
    """For the MLP, pixels are a set: a permutation of the pixels does not change the tokens."""
    torch.manual_seed(0)
    tokenizer, features = ClusterTokenizer(6, clustering(6, 5)).double(), random_features(5, 4)
    order = torch.randperm(20)
    shuffled = features.flatten(2)[:, :, order].unflatten(2, (5, 4))
    same = torch.allclose(tokenizer(shuffled)[0], tokenizer(features)[0])
    assert same is not on_a_grid


@pytest.mark.shows("PACA-10", "PACA-17")
def test_a_shared_assignment_groups_other_pixels_with_gradient():
    """Later blocks apply the assignment to their own pixels, and their gradient reaches the clustering through it."""
    clustering = MlpClustering(6, 5).double()
    first, later, features = (
        ClusterTokenizer(6, clustering).double(),
        SharedTokenizer(6).double(),
        random_features(4, 4),
    )
    _, assignment, _ = first(features)
    tokens, shared = later(features.square(), assignment)
    assert shared is assignment
    expected = F.layer_norm(assignment @ features.square().flatten(2).transpose(1, 2), (6,), eps=1e-6)
    torch.testing.assert_close(tokens, expected)
    attention = CrossAttention(6, 2).double()
    attention(features.flatten(2).transpose(1, 2), tokens).square().sum().backward()
    assert clustering.to_score.weight.grad.abs().max() > 0


def test_tokenizers_without_scores_or_assignment_raise():
    with pytest.raises(ValueError, match="expected scores"):
        ClusterTokenizer(6)(random_features(2, 2))
    with pytest.raises(ValueError, match="expected assignment"):
        SharedTokenizer(6)(random_features(2, 2))


@pytest.mark.shows("PACA-01")
def test_trace_holds_the_output_of_the_call():
    tokenizer, features = ClusterTokenizer(6, ConvClustering(6, 5)).double(), random_features(3, 4)
    output = tokenizer(features)
    trace = tokenizer.trace((features, None), output)
    assert trace.assignment is output[1]
    assert trace.scores is output[2]
    assert trace.maps().shape == (2, 5, 3, 4)
    assert torch.equal(trace.maps()[1, 2, 1, 3], trace.assignment[1, 2, 7])


def test_assignment_is_half_precision_under_autocast():
    """It is shared by up to 18 blocks; a float32 copy would be cast again in each."""
    tokenizer, features = ClusterTokenizer(16, ConvClustering(16, 5)), random_features(8, 8, 16).float()
    expected = tokenizer(features)[0]
    with torch.autocast("cpu", torch.bfloat16):
        tokens, assignment, _ = tokenizer(features)
    assert assignment.dtype == torch.bfloat16
    assert (assignment.float().sum(-1) - 1).abs().max() < 1e-2
    assert (tokens.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.shows("PACA-02", "PACA-03")
def test_cross_attention_matches_multi_head_attention():
    attention, pixels, tokens = CrossAttention(12, 3).double(), torch.randn(2, 30, 12).double(), torch.randn(2, 5, 12)
    tokens = tokens.double()
    weight = torch.cat([attention.to_query.weight, attention.to_key_value.weight])
    bias = torch.cat([attention.to_query.bias, attention.to_key_value.bias])
    expected, _ = F.multi_head_attention_forward(
        pixels.transpose(0, 1), tokens.transpose(0, 1), tokens.transpose(0, 1), 12, 3, weight, bias, None, None, False,
        0.0, attention.proj.weight, attention.proj.bias,
    )  # fmt: skip
    torch.testing.assert_close(attention(pixels, tokens), expected.transpose(0, 1))


class RecordShapes(TorchDispatchMode):
    """Collect the shape of every tensor that an operation returns."""

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
    """Shapes in which the number of pixels of a stage occurs twice."""
    model = saccade.create_model("paca_small", depths=(1, 1, 1, 1), **switches).eval()
    with torch.no_grad(), RecordShapes() as operations:
        model(torch.zeros(1, 3, side, side))
    pixels = [(side // stride) ** 2 for stride in (4, 8, 16, 32)]
    assert (1, 96, side // 4, side // 4) in operations.shapes
    return [shape for shape in operations.shapes if any(shape.count(number) > 1 for number in pixels)]


@pytest.mark.shows("PACA-68", "PACA-70")
def test_no_matrix_of_pixels_by_pixels_is_computed():
    """At 480 px stage 1 has 14400 pixels: a matrix of their pairs would take 830 MB per head."""
    assert square_shapes(480) == []
    with sdpa_kernel(SDPBackend.MATH):  # plain attention, not fused, has such a matrix
        assert (1, 2, 576, 576) in square_shapes(96, clusters=(0, 0, 0, 0))


# Sequences, and spatial reduction


@pytest.mark.shows("PACA-07")
@pytest.mark.parametrize("clustering", [MlpClustering, LinearClustering])
def test_clusters_of_a_sequence_are_those_of_a_grid_with_the_same_pixels(clustering):
    torch.manual_seed(0)
    tokenizer, features = ClusterTokenizer(6, clustering(6, 5)).double(), random_features(3, 4)
    on_grid, in_sequence = tokenizer(features), tokenizer(features.flatten(2).transpose(1, 2))
    for grid, sequence in zip(on_grid, in_sequence, strict=True):
        torch.testing.assert_close(grid, sequence)
    assert tokenizer.trace((features.flatten(2).transpose(1, 2),), in_sequence).maps().shape == (2, 5, 1, 12)


@pytest.mark.shows("PACA-07")
def test_token_to_cluster_attention_matches_eqs_1_2_and_6():
    """For a sequence without grid: softmax over the sequence, clusters, softmax over clusters."""
    torch.manual_seed(0)
    layer, sequence = TokenToClusterAttention(6, 2, num_tokens=5).double(), torch.randn(2, 11, 6).double()
    clustering, attn = layer.tokenizer.clustering, layer.attn
    scores = F.gelu(sequence @ clustering.fc.weight.T + clustering.fc.bias) @ clustering.to_score.weight.T
    assignment = (scores + clustering.to_score.bias).softmax(1)  # (B, N, M), over the sequence
    clusters = F.layer_norm(assignment.transpose(1, 2) @ sequence, (6,), eps=1e-6)
    query = attn.to_query(sequence).unflatten(2, (2, 3)).transpose(1, 2)
    key, value = (part.unflatten(2, (2, 3)).transpose(1, 2) for part in attn.to_key_value(clusters).chunk(2, dim=2))
    mixed = (query @ key.transpose(2, 3) / 3**0.5).softmax(-1) @ value
    torch.testing.assert_close(layer(sequence), attn.proj(mixed.transpose(1, 2).flatten(2)))
    order = torch.randperm(11)
    torch.testing.assert_close(layer(sequence[:, order]), layer(sequence)[:, order])


@pytest.mark.shows("PACA-14")
@pytest.mark.parametrize("size", [(8, 12), (7, 9)])
def test_strided_tokens_are_a_convolution_of_cells_and_grow_with_the_image(size):
    tokenizer, features = StridedTokenizer(6, 4).double(), random_features(*size)
    padded = F.pad(features, (0, -size[1] % 4, 0, -size[0] % 4))
    cells = F.unfold(padded, 4, stride=4).transpose(1, 2)  # (B, M, 6 * 16)
    expected = cells @ tokenizer.conv.weight.flatten(1).T + tokenizer.conv.bias
    tokens, link = tokenizer(features)
    torch.testing.assert_close(tokens, F.layer_norm(expected, (6,), eps=1e-6))
    assert tokens.shape[1] == -(-size[0] // 4) * -(-size[1] // 4)
    assert link is None


@pytest.mark.shows("PACA-14")
def test_pooled_tokens_are_adaptive_means_of_fixed_number():
    tokenizer = PooledTokenizer(6, 3).double()
    for size in ((8, 12), (7, 9), (2, 2)):
        features = random_features(*size)
        tokens, assignment = tokenizer(features)
        expected = F.adaptive_avg_pool2d(features, 3).flatten(2).transpose(1, 2)
        torch.testing.assert_close(tokens, F.layer_norm(expected, (6,), eps=1e-6))
        torch.testing.assert_close(assignment.sum(-1), torch.ones(2, 9, dtype=torch.float64))


@pytest.mark.shows("PACA-14")
def test_spatial_reduction_is_an_option_of_the_models():
    """PVT's strides 8, 4, 2: 49 tokens at 224 px, four times as many at 448 px; pooling: always 100."""
    counts = {}
    for kind in ("stride", "pool"):
        with torch.device("meta"):
            model = saccade.create_model("paca_tiny", clustering=kind, depths=(1, 1, 1, 1)).eval()
            for side in (224, 448):
                tokens = []
                hooks = [
                    stage.blocks[0].attn.register_forward_pre_hook(lambda _, args, into=tokens: into.append(args))
                    for stage in model.stages[:3]
                ]
                model(torch.empty(1, 3, side, side))
                counts[kind, side] = [args[1].shape[1] for args in tokens]
                for hook in hooks:
                    hook.remove()
    assert counts == {
        ("stride", 224): [49] * 3, ("stride", 448): [196] * 3, ("pool", 224): [100] * 3, ("pool", 448): [100] * 3
    }  # fmt: skip


@pytest.mark.shows("PACA-73")
@pytest.mark.parametrize("bias", [False, True])
def test_linear_clustering_loads_the_authors_tensors(bias):
    """One weight without bias; a bias is the same for all pixels, and their softmax ignores it."""
    torch.manual_seed(0)
    options = dict(clustering="linear", num_classes=3)
    model, other = (saccade.create_model("paca_nano", **options).eval() for _ in range(2))
    state_dict = model.state_dict()
    assert [key for key in state_dict if "to_score" in key] == [
        f"stages.{i}.blocks.0.tokenizer.clustering.to_score.weight" for i in range(3)
    ]
    if bias:
        state_dict |= {key.replace("weight", "bias"): torch.ones(len(value)) for key, value in state_dict.items()
                       if "to_score" in key}  # fmt: skip
    saccade.load_checkpoint(other, state_dict)
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(other(images), model(images))
