"""Multiply-adds by formula, as the papers derive them: N pixels, M tokens, C and D channels.

`saccade.benchmark.count` counts the same of modules; tests compare the two. Where a paper prints a formula its equation
is named; the others follow from the equations of the layer. Biases, norms and softmax are not counted.
"""


def global_attention(pixels: int, dim: int) -> int:
    """Self-attention of all pixels (SViT Eq. 12), with its four linear maps."""
    return 2 * pixels**2 * dim + 4 * pixels * dim**2  # SViT Eq. 13


def dense_sampling(pixels: int, tokens: int, dim: int, iterations: int = 1) -> int:
    """Super token sampling with associations of every pixel to every token."""
    return 2 * iterations * tokens * pixels * dim  # SViT Eq. 7


def super_token_sampling(pixels: int, dim: int, iterations: int = 1) -> int:
    """Super token sampling with nine tokens per pixel: cell means, then association and update per iteration."""
    return (1 + 18 * iterations) * pixels * dim  # SViT Eq. 8: 19 N C with one iteration


def token_upsampling(pixels: int, dim: int) -> int:
    """Nine tokens back onto every pixel (SViT Eq. 11)."""
    return 9 * pixels * dim


def super_token_attention(pixels: int, tokens: int, dim: int, iterations: int = 1) -> int:
    """Sampling, self-attention of the tokens, upsampling (SViT Eqs. 14-15)."""
    relate = global_attention(tokens, dim)
    parts = super_token_sampling(pixels, dim, iterations) + relate + token_upsampling(pixels, dim)  # SViT Eqs. 16-17
    return parts  # SViT Eq. 18: 2 M² C + 4 M C² + 28 N C


def conv_clustering(pixels: int, tokens: int, dim: int, kernel: int = 7) -> int:
    """Scores of PaCa Eqs. 4-5: depth-wise and point-wise convolution, then one score per cluster."""
    return pixels * dim * (kernel**2 + dim + tokens)


def mlp_clustering(pixels: int, tokens: int, dim: int, ratio: int = 4) -> int:
    """Scores of PaCa Eq. 6."""
    return pixels * ratio * dim * (dim + tokens)


def cluster_attention(pixels: int, tokens: int, dim: int) -> int:
    """Clusters from an assignment (PaCa Eq. 2), then attention of every pixel to them (PaCa Eq. 1)."""
    group = pixels * tokens * dim
    maps = 2 * pixels * dim**2 + 2 * tokens * dim**2  # queries and output of pixels, keys and values of clusters
    return group + maps + 2 * pixels * tokens * dim


def filter_tokenizer(pixels: int, tokens: int, dim: int, token_dim: int, value_groups: int = 0) -> int:
    """Scores, weighted means and token map of VT Eq. 1; `value_groups` adds a grouped linear map of the pixels."""
    values = pixels * dim**2 // value_groups if value_groups else 0
    return values + 2 * pixels * tokens * dim + tokens * dim * token_dim


def recurrent_tokenizer(pixels: int, queries: int, dim: int, token_dim: int, groups: int) -> int:
    """Queries from tokens, grouped keys and values of the pixels, attention, token map (VT Eq. 2)."""
    return 2 * queries * token_dim * dim + 2 * pixels * dim**2 // groups + 2 * pixels * queries * dim


def token_transformer(tokens: int, dim: int, key_groups: int = 1, value_groups: int = 1) -> int:
    """Attention with queries and keys of half the width (VT Eq. 3), and one feed-forward matrix (VT Eq. 4)."""
    maps = tokens * dim**2 // key_groups + tokens * dim**2 // value_groups + tokens * dim**2
    return maps + tokens**2 * dim // 2 + tokens**2 * dim


def token_projector(pixels: int, tokens: int, pixel_dim: int, dim: int, token_dim: int, groups: int) -> int:
    """Grouped queries of the pixels, keys and values of the tokens, attention (VT Eq. 5).

    Pixels are mapped to `dim` channels first, and tokens to values, where widths differ.
    """
    widen = pixels * pixel_dim * dim if pixel_dim != dim else 0
    values = tokens * token_dim * dim if token_dim != dim else 0
    return widen + pixels * dim**2 // groups + tokens * token_dim * dim + values + 2 * pixels * tokens * dim
