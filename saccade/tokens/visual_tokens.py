"""Visual tokens: four ways to group the pixels of a map into a few tokens (VT, VT-01 … VT-14, VTR-02 … VTR-04).

Every tokenizer is called with the map and the previous module's tokens (which only the recurrent one looks at) and
returns the tokens first and, behind them, its link to the pixels: the assignment itself, or what makes it. All pool
first and change the width afterwards, on the few tokens (VT-05).

What keeps training stable where Eq. 1, 2 and 6 have no scale and no norm: scores are divided by the root of their
width (`scale=False` takes that away), and every matrix is followed by batch norm (`norm=False`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.token_attention import ask_pixels
from saccade.layers.attention import tokens_ask
from saccade.layers.grid import to_pixels
from saccade.layers.linear import Linear, LinearNorm, ListNorm, pixel_linear
from saccade.tokens.trace import AssignmentTrace


class FilterTokenizer(nn.Module):
    """Learned filters score every pixel; a token is the mean of the pixels, weighted by its scores' softmax (Eq. 1).

    With `value_groups` a grouped linear map of the pixels is averaged, otherwise the pixels themselves.
    """

    def __init__(
        self,
        pixel_dim: int,
        token_dim: int,
        num_tokens: int,
        value_groups: int = 0,
        scale: bool = True,
        norm: bool = True,
    ):
        super().__init__()
        self.scale = pixel_dim**-0.5 if scale else 1.0
        self.to_score = Linear(pixel_dim, num_tokens, bias=False)
        nn.init.normal_(self.to_score.weight, std=1.0 if scale else pixel_dim**-0.5)  # scores as large as the pixels
        self.to_value = pixel_linear(pixel_dim, pixel_dim, value_groups, norm) if value_groups else nn.Identity()
        self.to_token = TokenMap(pixel_dim, token_dim, norm)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N)."""
        pixels = to_pixels(features)
        assignment = (self.to_score(pixels) * self.scale).transpose(1, 2).softmax(-1)
        return self.to_token(torch.matmul(assignment, self.to_value(pixels))), assignment

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> AssignmentTrace:
        """What one call of this module says about pixels and tokens."""
        tokens, assignment = output
        return AssignmentTrace(assignment, inputs[0].shape[2:], tokens=tokens)


class ClusterTokenizer(nn.Module):
    """The filters are the centroids of the image's own pixels, found by k-means (Eq. 6, VT-10 … VT-14).

    Clustering is a constant to autograd: gradients pass through the pixels, as arguments of the scores and as what
    is averaged. The scores are those of Eq. 6, of the raw pixels with unit centroids: no longer than a pixel is,
    they need no scale.
    """

    def __init__(self, pixel_dim: int, token_dim: int, num_tokens: int, iterations: int = 10, norm: bool = True):
        super().__init__()
        self.grid = token_grid(num_tokens)
        self.iterations = iterations
        self.to_token = TokenMap(pixel_dim, token_dim, norm)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N)."""
        pixels = to_pixels(features)
        constant = pixels.detach()
        centroids = kmeans(constant, torch.matmul(cell_shares(features, self.grid), constant), self.iterations)
        assignment = torch.matmul(centroids, pixels.transpose(1, 2)).softmax(-1)
        return self.to_token(torch.matmul(assignment, pixels)), assignment

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> AssignmentTrace:
        """What one call of this module says about pixels and tokens."""
        tokens, assignment = output
        return AssignmentTrace(assignment, inputs[0].shape[2:], tokens=tokens)


class PoolTokenizer(nn.Module):
    """No meaning, only place: the map averaged down to a grid of tokens, the baseline of Table 3 (VT-09)."""

    def __init__(self, pixel_dim: int, token_dim: int, num_tokens: int, norm: bool = True):
        super().__init__()
        self.grid = token_grid(num_tokens)
        self.to_token = TokenMap(pixel_dim, token_dim, norm)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N), the same for every image."""
        shares = cell_shares(features, self.grid)
        pooled = torch.matmul(shares, to_pixels(features))
        return self.to_token(pooled), shares.expand(features.shape[0], -1, -1)

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> AssignmentTrace:
        """What one call of this module says about pixels and tokens."""
        tokens, assignment = output
        return AssignmentTrace(assignment, inputs[0].shape[2:], tokens=tokens)


class RecurrentTokenizer(nn.Module):
    """The previous module's tokens ask the pixels for what the next tokens are made of (Eq. 2, VT-06, VTR-04).

    `to_query` is the paper's W_{T→R}. Keys and values are grouped linear maps of the pixels, 64 channels a group, and
    there are several heads. With `keep_half` only the first half of the tokens asks; the answers are put behind the
    other half, which is kept as it is, so that in the next module the kept ones ask. Otherwise all ask, none is kept.
    """

    def __init__(
        self,
        pixel_dim: int,
        token_dim: int,
        num_heads: int = 16,
        keep_half: bool = True,
        scale: bool = True,
        norm: bool = True,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.keep_half = keep_half
        self.scale = (pixel_dim // num_heads) ** -0.5 if scale else 1.0
        self.to_query = LinearNorm(token_dim, pixel_dim, norm=norm)
        self.to_key_value = pixel_linear(pixel_dim, 2 * pixel_dim, pixel_groups(pixel_dim, num_heads), norm)
        self.to_token = LinearNorm(pixel_dim, token_dim, norm=norm)

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> tokens (B, M, D), and query and key of the new ones.

        The assignment is the softmax over pixels of query · key, (B, heads, new, N): the fused attention never
        writes it down, `trace` does.
        """
        tokens = previous(tokens)
        asking = tokens.shape[1] // 2 if self.keep_half else tokens.shape[1]
        asked = self.to_query(tokens[:, :asking])  # (B, M, C)
        query = asked.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, M, C/heads)
        grouped = self.to_key_value.grouped(to_pixels(features))  # (B, N, groups, …), head by head: key, value
        both = grouped.unflatten(3, (self.num_heads // grouped.shape[2], 2, -1)).flatten(2, 3)
        key, value = both.transpose(1, 2).unbind(3)  # (B, heads, N, C/heads) each
        pooled = self.ask(asked, grouped, query, key, value)
        return torch.cat((tokens[:, asking:], self.to_token(pooled)), dim=1), query, key

    def ask(self, asked: Tensor, grouped: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries (B, M, C), keys and values in groups (B, N, groups, …), and all of them by heads -> (B, M, C)."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if tokens_ask(asked.shape[1], grouped.shape[1], (query.shape[3],), asked, grouped):
                return ask_pixels(asked, grouped.flatten(2), self.num_heads, self.scale)
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale).transpose(1, 2).flatten(2)

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> AssignmentTrace:
        """The new tokens and their assignment, averaged over heads; kept tokens were reported when they were made."""
        tokens, query, key = output
        assignment = (torch.matmul(query, key.transpose(2, 3)) * self.scale).softmax(-1).mean(1)  # (B, new, N)
        return AssignmentTrace(assignment, inputs[0].shape[2:], tokens=tokens[:, -query.shape[2] :])


class RepeatedTokenizer(nn.Module):
    """Without recurrence (Table 4): a static tokenizer makes all tokens anew, beside half of the previous (VT-45)."""

    def __init__(self, tokenizer: nn.Module):
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> tokens (B, M/2 + new, D), assignment of the new ones."""
        tokens = previous(tokens)
        new, assignment = self.tokenizer(features)
        return torch.cat((tokens[:, tokens.shape[1] // 2 :], new), dim=1), assignment


class KeepTokenizer(nn.Module):
    """Without projector (Table 7) the map has nothing new to read: the previous tokens go on (VT-28)."""

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> the same tokens."""
        return (previous(tokens),)


class TokenMap(nn.Module):
    """From the width of pixels to that of tokens: norm, linear map, norm (VTR-03)."""

    def __init__(self, pixel_dim: int, token_dim: int, norm: bool = True):
        super().__init__()
        self.norm = ListNorm(pixel_dim, enabled=norm)
        self.fc = LinearNorm(pixel_dim, token_dim, norm=norm)

    def forward(self, pooled: Tensor) -> Tensor:
        """pooled pixels (B, M, C) -> tokens (B, M, D)."""
        return self.fc(self.norm(pooled))


def previous(tokens: Tensor | None) -> Tensor:
    """The previous module's tokens, for a tokenizer that needs some (VT-07)."""
    if tokens is None:
        raise ValueError(
            "this tokenizer continues from the tokens of a previous module: pass tokens (B, M, D), "
            "or use a filter, clustering or pooling tokenizer in the first module."
        )
    return tokens


def kmeans(pixels: Tensor, seeds: Tensor, iterations: int) -> Tensor:
    """Lloyd's algorithm on unit vectors: pixels (B, N, C), first centroids (B, M, C) -> centroids (B, M, C) (VT-11).

    Between unit vectors the nearest is the one of largest product, so one matrix product stands for the distances; and
    a mean that is normalised is a sum that is normalised. A tie goes to the first centroid. A centroid that no pixel
    is near (or whose pixels cancel out) stays where it was (VT-12).
    """
    pixels, centroids = F.normalize(pixels, dim=-1, eps=1e-6), F.normalize(seeds, dim=-1, eps=1e-6)
    names = torch.arange(seeds.shape[1], device=pixels.device)
    for _ in range(iterations):
        nearest = torch.matmul(pixels, centroids.transpose(1, 2)).argmax(-1)  # (B, N)
        members = (nearest.unsqueeze(1) == names.unsqueeze(1)).to(pixels.dtype)  # (B, M, N)
        total = torch.matmul(members, pixels)
        length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
        centroids = torch.where(length > 1e-6, total / length.clamp(min=1e-6), centroids)
    return centroids


def cell_shares(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """The matrix (M, N) that averages a map down to a grid: adaptive average pooling as an assignment."""
    down, across = _shares(features, features.shape[2], grid[0]), _shares(features, features.shape[3], grid[1])
    return (down[:, None, :, None] * across[None, :, None, :]).flatten(2).flatten(0, 1)


def _shares(like: Tensor, length: int, parts: int) -> Tensor:
    """Along one side: (parts, length), every part with equal shares of the places it touches."""
    place, part = torch.arange(length, device=like.device), torch.arange(parts, device=like.device).unsqueeze(1)
    touched = (place >= part * length // parts) & (place < ((part + 1) * length + parts - 1) // parts)
    return touched.to(like.dtype) / touched.sum(1, keepdim=True).to(like.dtype)


def token_grid(num_tokens: int) -> tuple[int, int]:
    """The most square grid of that many places, rows <= columns."""
    rows = next(rows for rows in range(int(num_tokens**0.5), 0, -1) if num_tokens % rows == 0)
    if rows == 1 and num_tokens > 3:
        raise ValueError(
            f"{num_tokens} tokens make no grid to start from; choose a number with factors, such as {num_tokens + 1}."
        )
    return rows, num_tokens // rows


def pixel_groups(pixel_dim: int, num_heads: int) -> int:
    """Groups of the linear maps of pixels: 64 channels each, whole heads in each (VTR-04)."""
    if pixel_dim % num_heads:
        raise ValueError(f"a map of {pixel_dim} channels does not divide into {num_heads} heads; choose other heads.")
    most = max(1, min(num_heads, pixel_dim // 64))
    return next(groups for groups in range(most, 0, -1) if num_heads % groups == 0)


TOKENIZERS: dict[str, Callable[..., nn.Module]] = {
    "filter": FilterTokenizer,
    "clustering": ClusterTokenizer,
    "pooling": PoolTokenizer,
}  # of a first module, by name; put your own beside them: (pixel_dim, token_dim, num_tokens, norm=...) -> module
