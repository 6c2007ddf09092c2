"""Colours: one for every token, the same in every stage, told apart by colour-blind eyes too; and scales for maps."""

import numpy as np
import torch
from torch import Tensor

from saccade.tokens.trace import AssignmentTrace, AssociationTrace, RegionTrace, Trace

# Okabe and Ito's seven, then one by one the colour farthest from all before it, for normal, protan and deutan vision.
TOKEN_COLOURS = (
    "0072b2 e69f00 009e73 d55e00 56b4e9 cc79a7 f0e442 5affff 960000 0000ff 87d2a5 5a87ff 870f69 1e3cb4 964b5a 96ffb4 "
    "87d2ff c31e00 0f69f0 ff4b69 c32d96 c3d269 69c3c3 e10fc3 2df0d2 0087d2 5a3c87 4b6987 b4b469 2d963c 872d4b 1ea5ff "
    "87b496 ffb400 b4e1a5 785a2d 692dd2 d2f087 a55a5a 8796c3 3c96e1 e16987 b4961e 962d69 5a69d2 69c3ff 87d2d2 b46996 "
    "3ca55a 5ab4c3 1ef0ff b43c78 3cffd2 4ba5e1 2de13c c3c387 5a4ba5 87c3e1 1e4bf0 5a78f0 ff695a d2e169 b4a578 ff87b4"
)
NOBODY = (128, 128, 128)  # pixels that no token sees

# ColorBrewer's RdYlBu, reversed: blue low, red high as in the VT paper, but told apart without red and green cones.
BLUE_RED = "313695 4575b4 74add1 abd9e9 e0f3f8 ffffbf fee090 fdae61 f46d43 d73027 a50026"
DARK_BRIGHT = "000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 f7d13d fcffa4"  # inferno's anchors


def anchors(codes: str) -> np.ndarray:
    """Hexadecimal colours in a row -> (n, 3)."""
    return np.array([[int(code[i : i + 2], 16) for i in (0, 2, 4)] for code in codes.split()])


def token_colours(tokens: Tensor | np.ndarray | int) -> np.ndarray:
    """Colours (…, 3) uint8 of token numbers, or of the first n; from the 65th on they repeat."""
    numbers = np.arange(tokens) if isinstance(tokens, int) else np.asarray(tokens)
    table = anchors(TOKEN_COLOURS).astype(np.uint8)
    return np.where((numbers >= 0)[..., None], table[numbers % len(table)], np.uint8(NOBODY))


def colour_scale(values: np.ndarray, codes: str) -> np.ndarray:
    """Values in [0, 1] -> colours (…, 3) uint8, linear between the anchors."""
    table = anchors(codes)
    at = np.clip(values, 0, 1) * (len(table) - 1)
    channels = [np.interp(at, np.arange(len(table)), table[:, c]) for c in range(3)]
    return np.stack(channels, -1).round().astype(np.uint8)


def colour_numbers(traces: list[Trace], item: int = 0) -> list[np.ndarray]:
    """For every trace, the colour number of each token, so that a colour means the same thing in every stage.

    Tokens that live on keep theirs: SparseFormer's always, the others' from block to block of one stage, and super
    tokens of the same cell. Where a stage makes new tokens, each takes the colour of the token it overlaps most in the
    stage before, largest overlap first; tokens left over take the free colours.
    """
    numbers: list[np.ndarray] = []
    for i, trace in enumerate(traces):
        count = num_tokens(trace)
        if i == 0:
            numbers.append(np.arange(count))
        elif len(numbers[-1]) == count and lives_on(traces[i - 1], trace):
            numbers.append(numbers[-1])
        else:
            numbers.append(_follow(traces[i - 1].maps()[item], trace.maps()[item], numbers[-1]))
    return numbers


def lives_on(before: Trace, after: Trace) -> bool:
    """Whether token i of one step is token i of the next, if they are as many."""
    if isinstance(after, AssociationTrace) and isinstance(before, AssociationTrace):
        return before.grid == after.grid
    return isinstance(after, RegionTrace) or stage(before) == stage(after)


def stage(trace: Trace) -> str:
    """What the trace's block belongs to: "stages.0.blocks.1" -> "stages.0.blocks"."""
    return trace.name.rpartition(".")[0]


def num_tokens(trace: Trace) -> int:
    if isinstance(trace, AssociationTrace):
        return trace.grid[0] * trace.grid[1]
    return (trace.assignment if isinstance(trace, AssignmentTrace) else trace.regions).shape[1]


def _follow(before: Tensor, after: Tensor, numbers: np.ndarray) -> np.ndarray:
    """Greedy matching of maps (M, H, W) and (M', H', W') by the share of mass they have in common."""
    small = torch.nn.functional.adaptive_avg_pool2d(before.float()[None], after.shape[1:])[0]
    shares = [maps.flatten(1) / maps.flatten(1).sum(1, keepdim=True).clamp(min=1e-12) for maps in (small, after)]
    overlap = torch.stack([torch.minimum(old, shares[1]).sum(1) for old in shares[0]]).cpu().numpy()  # (M, M')
    found = np.full(len(after), -1)
    for flat in np.argsort(-overlap, axis=None, kind="stable"):
        old, new = np.unravel_index(flat, overlap.shape)
        if found[new] < 0 and numbers[old] not in found:
            found[new] = numbers[old]
    free = iter(n for n in range(len(after) + len(numbers)) if n not in found)
    return np.array([n if n >= 0 else next(free) for n in found])
