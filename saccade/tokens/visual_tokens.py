"""Visual tokens: four ways to group pixels into tokens (VT Sec. 3.1, Table 3).

Every tokenizer takes the features and the previous module's tokens, which only the recurrent one reads, and returns the
tokens first, then its link to the pixels: the assignment itself, or query and key. All pool pixels first, and map the
pooled ones to the width of tokens.

VT Eqs. 1, 2 and 6 have no scale and no norm. For stable training scores are divided by the root of their width
(`scale=False` omits that), and every matrix is followed by batch norm (`norm=False`). The authors' VT-FPN module has a
batch norm on filter scores too (`score_norm`) and can append where a token's pixels are (`PositionEncoding`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.layers.grid import to_pixels
from saccade.layers.linear import Linear, LinearNorm, ListNorm, pixel_linear
from saccade.ops.attention import pixel_pooling_attention
from saccade.tokens.trace import AssignmentTrace


class AssignmentTokenizer(nn.Module):
    """Base of tokenizers that return tokens (B, M, D) and the assignment (B, M, N)."""

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> AssignmentTrace:
        """The assignment of one call."""
        tokens, assignment = output
        return AssignmentTrace(assignment, grid_size(inputs[0]), tokens=tokens)


class FilterTokenizer(AssignmentTokenizer):
    """Group pixels by learned filters: a token is a mean of pixels, weighted by the softmax of its scores (VT Eq. 1).

    With `value_groups` the mean is over a grouped linear map of the pixels, otherwise over the pixels themselves.
    `score_norm` is a batch norm on the scores, before their scale.
    """

    def __init__(
        self,
        pixel_dim: int,
        token_dim: int,
        num_tokens: int,
        value_groups: int = 0,
        scale: bool = True,
        norm: bool = True,
        score_norm: bool = False,
        position: "PositionEncoding | None" = None,
    ):
        super().__init__()
        self.scale = pixel_dim**-0.5 if scale else 1.0
        self.to_score = Linear(pixel_dim, num_tokens, bias=False)
        self.score_norm = ListNorm(num_tokens) if score_norm else nn.Identity()
        if not score_norm:  # scores as large as the pixels
            nn.init.normal_(self.to_score.weight, std=1.0 if scale else pixel_dim**-0.5)
        self.to_value = pixel_linear(pixel_dim, pixel_dim, value_groups, norm) if value_groups else nn.Identity()
        self.to_token = TokenEmbedding(pixel_dim, token_dim, norm, position)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N)."""
        pixels = to_pixels(features)
        scores = self.score_norm(self.to_score(pixels)) * self.scale  # (B, N, M)
        assignment = scores.transpose(1, 2).softmax(-1)  # VT Eq. 1: over pixels
        pooled = torch.matmul(assignment, self.to_value(pixels))  # VT Eq. 1: Aᵀ X
        return self.to_token(pooled, assignment.unsqueeze(1), grid_size(features)), assignment


class KMeansTokenizer(AssignmentTokenizer):
    """Group pixels by filters that are the k-means centroids of the image's own pixels (VT Eq. 6, Listing 1).

    Centroids are constants to autograd: gradients pass through the pixels, in the scores and in the mean. Scores are
    products of raw pixels with unit centroids, and need no scale.
    """

    def __init__(self, pixel_dim: int, token_dim: int, num_tokens: int, iterations: int = 10, norm: bool = True):
        super().__init__()
        self.grid = token_grid(num_tokens)
        self.iterations = iterations
        self.to_token = TokenEmbedding(pixel_dim, token_dim, norm)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N)."""
        pixels = to_pixels(features)
        constant = pixels.detach()
        centroids = kmeans(constant, torch.matmul(cell_weights(features, self.grid), constant), self.iterations)
        assignment = torch.matmul(centroids, pixels.transpose(1, 2)).softmax(-1)  # VT Eq. 6
        return self.to_token(torch.matmul(assignment, pixels)), assignment


class PoolTokenizer(AssignmentTokenizer):
    """Average the features over a grid of cells, one token per cell: the baseline of VT Table 3."""

    def __init__(self, pixel_dim: int, token_dim: int, num_tokens: int, norm: bool = True):
        super().__init__()
        self.grid = token_grid(num_tokens)
        self.to_token = TokenEmbedding(pixel_dim, token_dim, norm)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N), the same for every image."""
        weights = cell_weights(features, self.grid)
        pooled = torch.matmul(weights, to_pixels(features))
        return self.to_token(pooled), weights.expand(features.shape[0], -1, -1)


class RecurrentTokenizer(nn.Module):
    """Attention from the previous module's tokens to the pixels (VT Eq. 2), with several heads.

    `to_query` is the paper's W_{T→R}. Keys and values are grouped linear maps of the pixels, 64 channels per group.
    With `keep_half` only the first half of the tokens are queries; the new tokens follow the other half, which stays
    unchanged, so that in the next module those are the queries. Otherwise all tokens are replaced.
    """

    def __init__(
        self,
        pixel_dim: int,
        token_dim: int,
        num_heads: int = 16,
        keep_half: bool = True,
        scale: bool = True,
        norm: bool = True,
        position: "PositionEncoding | None" = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.keep_half = keep_half
        self.scale = (pixel_dim // num_heads) ** -0.5 if scale else 1.0
        self.to_query = LinearNorm(token_dim, pixel_dim, norm=norm)
        self.to_key_value = pixel_linear(pixel_dim, 2 * pixel_dim, pixel_groups(pixel_dim, num_heads), norm)
        self.to_token = TokenEmbedding(pixel_dim, token_dim, norm, position)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> tokens (B, M, D), query and key of the new ones by heads.

        The assignment (B, heads, new, N) is computed only for a position encoding, and by `trace`.
        """
        tokens = previous(tokens)
        count = tokens.shape[1] // 2 if self.keep_half else tokens.shape[1]
        query = self.to_query(tokens[:, :count])  # (B, new, C), VT Eq. 2: W_R = T_in W_{T→R}
        key_value = self.to_key_value(to_pixels(features))  # (B, N, 2 C), head by head: key, value
        # VT Eq. 2: softmax over pixels (query @ key.T) @ value
        pooled = pixel_pooling_attention(query, key_value, self.num_heads, self.scale)
        query = query.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, new, C/heads)
        key = key_value.unflatten(2, (self.num_heads, 2, -1))[:, :, :, 0].transpose(1, 2)  # (B, heads, N, C/heads)
        assignment = self.assignment(query, key) if self.to_token.position is not None else None
        new = self.to_token(pooled, assignment, grid_size(features))
        return torch.cat((tokens[:, count:], new), dim=1), query, key

    def assignment(self, query: Tensor, key: Tensor) -> Tensor:
        """query (B, heads, new, C/heads), key (B, heads, N, C/heads) -> (B, heads, new, N)."""
        return (torch.matmul(query, key.transpose(2, 3)) * self.scale).softmax(-1)

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> AssignmentTrace:
        """The new tokens and their assignment, averaged over heads."""
        tokens, query, key = output
        assignment = self.assignment(query, key).mean(1)  # (B, new, N)
        return AssignmentTrace(assignment, grid_size(inputs[0]), tokens=tokens[:, -query.shape[2] :])


class RepeatedTokenizer(nn.Module):
    """Without recurrence (VT Table 4): all tokens of a static tokenizer, after half of the previous ones."""

    def __init__(self, tokenizer: nn.Module):
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> tokens (B, M/2 + new, D), assignment of the new ones."""
        tokens = previous(tokens)
        new, assignment = self.tokenizer(features)
        return torch.cat((tokens[:, tokens.shape[1] // 2 :], new), dim=1), assignment


class KeepTokenizer(nn.Module):
    """Without projector (VT Table 7) the features do not change, so the previous tokens are returned."""

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> the same tokens."""
        return (previous(tokens),)


class TokenEmbedding(nn.Module):
    """Map pooled pixels to the width of tokens: norm, linear map, norm. A position is appended to the pooled pixels."""

    def __init__(self, pixel_dim: int, token_dim: int, norm: bool = True, position: "PositionEncoding | None" = None):
        super().__init__()
        self.norm = ListNorm(pixel_dim, enabled=norm)
        self.position = position
        self.fc = LinearNorm(pixel_dim + (position.dim if position is not None else 0), token_dim, norm=norm)

    def forward(self, pooled: Tensor, assignment: Tensor | None = None, grid: tuple[int, int] = (0, 0)) -> Tensor:
        """pooled pixels (B, M, C) -> tokens (B, M, D). Only a position reads the assignment (B, heads, M, H * W)."""
        pooled = self.norm(pooled)
        if self.position is not None and assignment is not None:
            pooled = torch.cat((pooled, self.position(assignment, grid)), dim=2)
        return self.fc(pooled)


class PositionEncoding(nn.Module):
    """Where the pixels of a token are: its assignment as a small map, one vector per token. Of VT-FPN (released code).

    The map is resized to `size` x `size`, then to half that `halvings` times by 3x3 convolutions over the
    heads, reduced to one channel and flattened; a linear map over positions follows.
    """

    def __init__(self, num_heads: int, size: int, halvings: int = 0):
        super().__init__()
        if size % 2**halvings:
            raise ValueError(f"size ({size}) must be divisible by 2 ** halvings ({2**halvings}). Choose another size.")
        self.size = size
        self.dim = (size >> halvings) ** 2
        layers: list[nn.Module] = []
        for _ in range(halvings):
            layers += [nn.Conv2d(num_heads, num_heads, 3, 2, 1, bias=False), nn.BatchNorm2d(num_heads)]
        self.reduce = nn.Sequential(*layers, nn.Conv2d(num_heads, 1, 1, bias=False), nn.BatchNorm2d(1))
        self.fc = LinearNorm(self.dim, self.dim)

    def forward(self, assignment: Tensor, grid: tuple[int, int]) -> Tensor:
        """assignment (B, heads, M, H * W) -> (B, M, dim)."""
        maps = assignment.transpose(1, 2).flatten(0, 1).unflatten(2, grid)  # (B M, heads, H, W)
        maps = F.interpolate(maps, (self.size, self.size), mode="bilinear")
        return self.fc(self.reduce(maps).flatten(1).unflatten(0, (assignment.shape[0], assignment.shape[2])))


def previous(tokens: Tensor | None) -> Tensor:
    """The previous module's tokens, for a tokenizer that needs them."""
    if tokens is None:
        raise ValueError(
            "expected tokens (B, M, D) of a previous module, got None. "
            "Use a filter, clustering or pooling tokenizer in the first module."
        )
    return tokens


def kmeans(pixels: Tensor, seeds: Tensor, iterations: int) -> Tensor:
    """Lloyd's algorithm on unit vectors (VT Listing 1): pixels (B, N, C), seeds (B, M, C) -> centroids (B, M, C).

    The nearest unit vector has the largest dot product, so one matrix product replaces the distances; a normalised mean
    is a normalised sum. Ties go to the first centroid. A centroid without pixels, or whose pixels cancel out, is
    unchanged (Listing 1 would divide by zero).
    """
    pixels, centroids = F.normalize(pixels, dim=-1, eps=1e-6), F.normalize(seeds, dim=-1, eps=1e-6)
    index = torch.arange(seeds.shape[1], device=pixels.device)
    for _ in range(iterations):
        nearest = torch.matmul(pixels, centroids.transpose(1, 2)).argmax(-1)  # (B, N)
        members = (nearest.unsqueeze(1) == index.unsqueeze(1)).to(pixels.dtype)  # (B, M, N)
        total = torch.matmul(members, pixels)
        length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
        centroids = torch.where(length > 1e-6, total / length.clamp(min=1e-6), centroids)
    return centroids


def cell_weights(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """Adaptive average pooling to a grid, as an assignment (M, N)."""
    height, width = grid_size(features)
    down, across = _axis_weights(features, height, grid[0]), _axis_weights(features, width, grid[1])
    return (down[:, None, :, None] * across[None, :, None, :]).flatten(2).flatten(0, 1)


def _axis_weights(like: Tensor, length: int, cells: int) -> Tensor:
    """The same along one axis: (cells, length), rows sum to 1."""
    position, cell = torch.arange(length, device=like.device), torch.arange(cells, device=like.device).unsqueeze(1)
    inside = (position >= cell * length // cells) & (position < ((cell + 1) * length + cells - 1) // cells)
    return inside.to(like.dtype) / inside.sum(1, keepdim=True).to(like.dtype)


def grid_size(features: Tensor) -> tuple[int, int]:
    """Height and width of features (B, C, H, W)."""
    return features.shape[2], features.shape[3]


def token_grid(num_tokens: int) -> tuple[int, int]:
    """The most square grid (rows, columns) of that many cells, rows <= columns."""
    rows = next(rows for rows in range(int(num_tokens**0.5), 0, -1) if num_tokens % rows == 0)
    if rows == 1 and num_tokens > 3:
        raise ValueError(
            f"expected a num_tokens with factors, got {num_tokens}. Choose another, such as {num_tokens + 1}."
        )
    return rows, num_tokens // rows


def pixel_groups(pixel_dim: int, num_heads: int) -> int:
    """Number of groups of the linear maps of pixels: 64 channels and complete heads in each."""
    if pixel_dim % num_heads:
        raise ValueError(f"channels ({pixel_dim}) must be divisible by num_heads ({num_heads}). Choose other heads.")
    most = max(1, min(num_heads, pixel_dim // 64))
    return next(groups for groups in range(most, 0, -1) if num_heads % groups == 0)


TOKENIZERS: dict[str, Callable[..., nn.Module]] = {
    "filter": FilterTokenizer,
    "clustering": KMeansTokenizer,
    "pooling": PoolTokenizer,
}  # of a first module, by name; add your own: (pixel_dim, token_dim, num_tokens, norm=...) -> module
