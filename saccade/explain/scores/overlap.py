"""How alike and how wide the tokens' maps are: redundancy (PaCa's authors see redundant clusters) and entropy."""

import torch
from torch import Tensor


def redundancy(maps: Tensor) -> float:
    """Mean over pairs of tokens of the mass their maps (M, H, W) have in common: 0 apart, 1 all the same."""
    shares = _shares(maps)
    count = len(shares)
    if count < 2:
        return 0.0
    common = sum(float(torch.minimum(one, shares[i + 1 :]).sum()) for i, one in enumerate(shares[:-1]))
    return common / (count * (count - 1) / 2)


def width(maps: Tensor) -> float:
    """Mean entropy of a token over pixels, divided by its maximum: 0 one pixel each, 1 the whole image each."""
    shares = _shares(maps)
    entropy = -torch.special.xlogy(shares, shares).sum(1)
    return float(entropy.mean() / torch.tensor(float(max(shares.shape[1], 2))).log())


def doubt(maps: Tensor) -> float:
    """Mean entropy of a pixel over tokens, divided by its maximum: 0 every pixel has one token, 1 all the same."""
    columns = maps.double().flatten(1).clamp(min=0)
    total = columns.sum(0)
    seen = total > 0
    shares = columns[:, seen] / total[seen]
    if shares.numel() == 0:
        return 0.0
    entropy = -torch.special.xlogy(shares, shares).sum(0)
    return float(entropy.mean() / torch.tensor(float(max(len(maps), 2))).log())


def _shares(maps: Tensor) -> Tensor:
    """Maps as distributions over pixels, (M, N); tokens that see nothing are left out."""
    flat = maps.double().flatten(1).clamp(min=0)
    flat = flat[flat.sum(1) > 0]
    return flat / flat.sum(1, keepdim=True)
