"""Relations among tokens against their equations, written as loops."""

from math import sqrt

import pytest
import torch
from torch import nn

from saccade.layers.linear import FoldedLinearNorm, GroupedLinear, LinearNorm, ListNorm
from saccade.layers.relation import EquationTransformer, FeedForward, GraphConvolution, VisualTokenTransformer
from tests import slow

B, M, D = 2, 5, 24


def tokens(seed=1):
    return torch.randn(B, M, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_folded_linear_norm_matches_linear_norm(groups, training):
    plain, folded = slow.randomise(LinearNorm(D, 12, groups)), FoldedLinearNorm(D, 12, groups).double()
    folded.load_state_dict(plain.state_dict())
    plain.train(training)
    folded.train(training)
    outputs = [layer(tokens()) for layer in (plain, folded)]
    torch.testing.assert_close(*outputs)
    for a, b in zip(
        torch.autograd.grad(outputs[0].square().sum(), list(plain.parameters())),
        torch.autograd.grad(outputs[1].square().sum(), list(folded.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.shows("VTR-01")
@pytest.mark.parametrize("groups", [1, 3])
def test_linear_norm_matches_convolution_and_batch_norm(groups):
    layer = slow.randomise(LinearNorm(D, 12, groups))
    slow.agree(layer(tokens()), [slow.linear_norm(image, layer) for image in tokens().tolist()])
    conv = nn.Conv1d(D, 12, 1, groups=groups, bias=False).double()
    weight = layer.linear.weight.transpose(1, 2).flatten(0, 1) if groups > 1 else layer.linear.weight
    conv.weight.data.copy_(weight.unsqueeze(2))
    expected = layer.norm.bn(conv(tokens().transpose(1, 2))).transpose(1, 2)
    torch.testing.assert_close(layer(tokens()), expected)


def test_grouped_linear_rejects_indivisible_groups():
    with pytest.raises(ValueError, match="divisible by groups \\(5\\)"):
        GroupedLinear(24, 12, 5)


def test_list_norm_statistics_are_over_images_and_vectors():
    vectors, layer = tokens(), ListNorm(D).double().train()
    output = layer(vectors)
    expected = (vectors - vectors.mean((0, 1))) / (vectors.var((0, 1), unbiased=False) + layer.bn.eps).sqrt()
    torch.testing.assert_close(output, expected)


def slow_transformer(vectors, layer):
    query, key = slow.deal(slow.linear_norm(vectors, layer.to_query_key), layer.num_heads)
    value = slow.linear_norm(vectors, layer.to_value)
    mixed = slow.norm(slow.attend_in_heads(query, key, value, layer.num_heads), layer.norm)
    vectors = slow.add(vectors, mixed)
    return slow.add(vectors, slow.linear_norm(slow.relu(vectors), layer.mlp.fc))


@pytest.mark.shows("VT-17", "VTR-05", "VTR-06")
@pytest.mark.parametrize(("heads", "key_groups", "value_groups"), [(1, 1, 1), (4, 2, 1), (4, 4, 2)])
def test_transformer_matches_its_formula(heads, key_groups, value_groups):
    layer = slow.randomise(VisualTokenTransformer(D, heads, key_groups, value_groups))
    slow.agree(layer(tokens()), [slow_transformer(image, layer) for image in tokens().tolist()])


@pytest.mark.shows("VT-15", "VT-16", "VT-17")
@pytest.mark.parametrize("scale", [False, True])
def test_equation_transformer_matches_eqs_3_and_4(scale):
    """T' = T + softmax_L((T K)(T Q)ᵀ) T and T'' = T' + relu(T' F1) F2."""
    layer = slow.randomise(EquationTransformer(D, 8, scale))

    def equations(image):
        row, column = slow.linear(image, layer.to_row), slow.linear(image, layer.to_column)
        image = slow.add(image, slow.attend(row, column, image, 1 / sqrt(8) if scale else 1.0))
        return slow.add(image, slow.linear(slow.relu(slow.linear(image, layer.fc1)), layer.fc2))

    slow.agree(layer(tokens()), [equations(image) for image in tokens().tolist()])


@pytest.mark.shows("VT-20")
def test_graph_convolution_matches_its_formula():
    """T + relu(norm(G T W))."""
    layer = slow.randomise(GraphConvolution(D, M))

    def equation(image):
        graph = slow.mix(layer.adjacency.tolist(), image)
        return slow.add(image, slow.relu(slow.linear_norm(graph, layer.fc)))

    slow.agree(layer(tokens()), [equation(image) for image in tokens().tolist()])


@pytest.mark.shows("VT-19")
def test_feed_forward_matches_its_formula():
    layer = slow.randomise(FeedForward(D))
    expected = [slow.add(image, slow.linear_norm(slow.relu(image), layer.fc)) for image in tokens().tolist()]
    slow.agree(layer(tokens()), expected)


@pytest.mark.shows("VT-18")
@pytest.mark.parametrize("layer", [VisualTokenTransformer(D, 4, 2), EquationTransformer(D, 8), FeedForward(D)])
def test_relations_are_equivariant_to_token_order(layer):
    """A permutation of the tokens permutes the output; not in a graph convolution, whose rows belong to tokens."""
    slow.randomise(layer)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(layer(tokens()[:, order]), layer(tokens())[:, order])
    graph = slow.randomise(GraphConvolution(D, M))
    assert not torch.allclose(graph(tokens()[:, order]), graph(tokens())[:, order], atol=1e-3)


def influence(layer, vectors):
    """Gradient of token 0 of the output with respect to every input token: the effective weights."""
    vectors = vectors.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(vectors)[:, 0].sum(), vectors)
    return gradient.detach()


@pytest.mark.shows("VT-21")
def test_transformer_weights_depend_on_the_image_and_graph_weights_do_not():
    """Where its ReLU is linear, a graph convolution is one matrix for all images."""
    graph = slow.randomise(GraphConvolution(D, M))
    graph.fc.norm.bn.bias.data += 1e3  # far from the ReLU's kink
    first, second = influence(graph, tokens(1)), influence(graph, tokens(2))
    torch.testing.assert_close(first, second)
    transformer = slow.randomise(VisualTokenTransformer(D, 4))
    transformer.mlp.fc.linear.weight.data.zero_()
    assert (influence(transformer, tokens(1)) - influence(transformer, tokens(2))).abs().max() > 1e-2


@pytest.mark.shows("VTR-01")
@pytest.mark.parametrize("layer", [VisualTokenTransformer(D, 4, 2), FeedForward(D)])
def test_relation_starts_as_the_identity_and_trains(layer):
    """Zero gains get a gradient in the first step, the weights before them in the second."""
    layer = layer.double().train()
    torch.testing.assert_close(layer(tokens()), tokens())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (layer(tokens()) - tokens(2)).square().mean().backward()
        optimizer.step()
    assert all(p.grad.abs().max() > 0 for n, p in layer.named_parameters() if n.endswith("linear.weight"))


def test_transformer_rejects_indivisible_heads():
    with pytest.raises(ValueError, match="divisible by 2 \\* num_heads \\(5\\)"):
        VisualTokenTransformer(D, 5)
