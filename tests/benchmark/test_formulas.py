"""Formulas of the papers against the counter."""

import pytest
import torch

from saccade.benchmark import count, formulas
from saccade.layers.attention import CrossAttention
from saccade.layers.relation import VisualTokenTransformer
from saccade.models.svit import PixelAttention, SuperTokenAttention
from saccade.tokens.clusters import ClusterTokenizer, ConvClustering, MlpClustering
from saccade.tokens.projector import TokenProjector
from saccade.tokens.super_tokens import DenseSuperTokenizer, SuperTokenizer
from saccade.tokens.visual_tokens import FilterTokenizer, RecurrentTokenizer

SIDE, DIM = 24, 32
PIXELS = SIDE**2


def features(dim=DIM, side=SIDE):
    return torch.empty(1, dim, side, side)


def test_formulas_of_svit_are_the_printed_ones():
    """Eqs. 7, 8, 13 and 18, with the sizes of the first stage of SViT-S."""
    n, m, c = 56**2, 49, 64
    assert formulas.dense_sampling(n, m, c, 2) == 2 * 2 * m * n * c
    assert formulas.super_token_sampling(n, c) == 19 * n * c
    assert formulas.global_attention(n, c) == 2 * n**2 * c + 4 * n * c**2
    assert formulas.super_token_attention(n, m, c) == 2 * m**2 * c + 4 * m * c**2 + 28 * n * c
    assert formulas.global_attention(n, c) > 50 * formulas.super_token_attention(n, m, c)


@pytest.mark.shows("SVIT-17", "SVIT-18", "SVIT-59")
@pytest.mark.parametrize("iterations", [1, 2])
def test_super_token_attention_has_the_multiply_adds_of_eq_18(iterations):
    """Less the cell means (N C), which multiply nothing."""
    module = SuperTokenAttention(DIM, 2, SuperTokenizer(4, iterations))
    expected = formulas.super_token_attention(PIXELS, (SIDE // 4) ** 2, DIM, iterations) - PIXELS * DIM
    assert count(module, inputs=(features(),)).madds == expected
    assert count(PixelAttention(DIM, 2), inputs=(features(),)).madds == formulas.global_attention(PIXELS, DIM)


@pytest.mark.shows("SVIT-17", "SVIT-63")
@pytest.mark.parametrize("iterations", [1, 2])
def test_dense_sampling_has_the_multiply_adds_of_eq_7(iterations):
    tokens = (SIDE // 4) ** 2
    module = DenseSuperTokenizer(4, iterations)
    assert count(module, inputs=(features(),)).madds == formulas.dense_sampling(PIXELS, tokens, DIM, iterations)


@pytest.mark.shows("PACA-68")
@pytest.mark.parametrize(
    ("clustering", "scores"), [(ConvClustering, formulas.conv_clustering), (MlpClustering, formulas.mlp_clustering)]
)
def test_cluster_attention_has_the_multiply_adds_of_its_formula(clustering, scores):
    tokens = 10
    tokenizer = ClusterTokenizer(DIM, clustering(DIM, tokens))
    group = count(tokenizer, inputs=(features(),)).madds
    relate = count(CrossAttention(DIM, 2), inputs=(torch.empty(1, PIXELS, DIM), torch.empty(1, tokens, DIM))).madds
    expected = scores(PIXELS, tokens, DIM) + formulas.cluster_attention(PIXELS, tokens, DIM)
    assert group + relate == expected


@pytest.mark.shows("VT-69")
def test_visual_token_modules_have_the_multiply_adds_of_their_formulas():
    tokens, dim, token_dim = 6, 128, 64
    grouped = count(FilterTokenizer(dim, token_dim, tokens, 2), inputs=(features(dim),))
    assert grouped.madds == formulas.filter_tokenizer(PIXELS, tokens, dim, token_dim, 2)
    plain = count(FilterTokenizer(dim, token_dim, tokens), inputs=(features(dim),))
    assert plain.madds == formulas.filter_tokenizer(PIXELS, tokens, dim, token_dim)
    previous = torch.empty(1, tokens, token_dim)
    recurrent = count(RecurrentTokenizer(dim, token_dim, 4), inputs=(features(dim), previous))
    assert recurrent.madds == formulas.recurrent_tokenizer(PIXELS, tokens // 2, dim, token_dim, 2)
    transformer = count(VisualTokenTransformer(token_dim, 4, 2), inputs=(previous,))
    assert transformer.madds == formulas.token_transformer(tokens, token_dim, 2)
    for pixel_dim, width in ((dim, dim), (32, dim), (dim, token_dim)):
        projector = count(TokenProjector(pixel_dim, width, token_dim, 4), inputs=(features(pixel_dim), previous))
        groups = max(1, width // 64)
        assert projector.madds == formulas.token_projector(PIXELS, tokens, pixel_dim, width, token_dim, groups)
