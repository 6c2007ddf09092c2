"""Token colours that are distinguishable for colour-blind readers and consistent across stages, and colour scales."""

import numpy as np
import torch
from torch import Tensor

from saccade.tokens.trace import AssociationTrace, RegionTrace, Trace, num_tokens

# The seven colours of Okabe and Ito, then greedily the colour farthest from all before it, for normal, protan and
# deutan vision.
TOKEN_COLOURS = (
    "0072b2 e69f00 009e73 d55e00 56b4e9 cc79a7 f0e442 5affff 960000 0000ff 87d2a5 5a87ff 870f69 1e3cb4 964b5a 96ffb4 "
    "87d2ff c31e00 0f69f0 ff4b69 c32d96 c3d269 69c3c3 e10fc3 2df0d2 0087d2 5a3c87 4b6987 b4b469 2d963c 872d4b 1ea5ff "
    "87b496 ffb400 b4e1a5 785a2d 692dd2 d2f087 a55a5a 8796c3 3c96e1 e16987 b4961e 962d69 5a69d2 69c3ff 87d2d2 b46996 "
    "3ca55a 5ab4c3 1ef0ff b43c78 3cffd2 4ba5e1 2de13c c3c387 5a4ba5 87c3e1 1e4bf0 5a78f0 ff695a d2e169 b4a578 ff87b4"
)
NO_TOKEN = (128, 128, 128)  # pixels that belong to no token

# ColorBrewer's RdYlBu, reversed: blue low, red high as in VT Figs. 5, 7, 8, and safe for red-green colour blindness.
BLUE_RED = "313695 4575b4 74add1 abd9e9 e0f3f8 ffffbf fee090 fdae61 f46d43 d73027 a50026"
DARK_BRIGHT = "000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 f7d13d fcffa4"  # samples of inferno


def parse_colours(codes: str) -> np.ndarray:
    """Hexadecimal colours separated by spaces -> (n, 3)."""
    return np.array([[int(code[i : i + 2], 16) for i in (0, 2, 4)] for code in codes.split()])


def token_colours(indices: Tensor | np.ndarray | int) -> np.ndarray:
    """Colours (…, 3) uint8 of colour indices, or of the first n; they repeat after 64, and -1 is NO_TOKEN."""
    indices = np.arange(indices) if isinstance(indices, int) else np.asarray(indices)
    table = parse_colours(TOKEN_COLOURS).astype(np.uint8)
    return np.where((indices >= 0)[..., None], table[indices % len(table)], np.array(NO_TOKEN, dtype=np.uint8))


def token_colour(index: int) -> tuple[int, int, int]:
    """Colour of one colour index."""
    red, green, blue = token_colours(np.array(index)).tolist()
    return red, green, blue


def colour_scale(values: np.ndarray, codes: str) -> np.ndarray:
    """Values in [0, 1] -> colours (…, 3) uint8, interpolated linearly between the colours of `codes`."""
    table = parse_colours(codes)
    positions = np.clip(values, 0, 1) * (len(table) - 1)
    channels = [np.interp(positions, np.arange(len(table)), table[:, c]) for c in range(3)]
    return np.stack(channels, -1).round().astype(np.uint8)


def colour_indices(traces: list[Trace], item: int = 0) -> list[np.ndarray]:
    """Colour index of each token of every trace, so that a colour means the same thing in every stage.

    Tokens that persist keep their colour: SparseFormer's always, the others' within a stage, and super tokens of the
    same grid. Tokens of a new stage take the colour of the token of the previous stage they overlap most, largest
    overlap first; the remaining tokens take unused colours.
    """
    indices: list[np.ndarray] = []
    for i, trace in enumerate(traces):
        count = num_tokens(trace)
        if i == 0:
            indices.append(np.arange(count))
        elif len(indices[-1]) == count and same_tokens(traces[i - 1], trace):
            indices.append(indices[-1])
        else:
            indices.append(_match_by_overlap(traces[i - 1].maps()[item], trace.maps()[item], indices[-1]))
    return indices


def same_tokens(before: Trace, after: Trace) -> bool:
    """Whether token i of one step is token i of the next, given equal counts."""
    if isinstance(after, AssociationTrace) and isinstance(before, AssociationTrace):
        return before.grid == after.grid
    return isinstance(after, RegionTrace) or stage_name(before) == stage_name(after)


def stage_name(trace: Trace) -> str:
    """Name of the stage of a trace's block: "stages.0.blocks.1" -> "stages.0.blocks"."""
    return trace.name.rpartition(".")[0]


def _match_by_overlap(before: Tensor, after: Tensor, indices: np.ndarray) -> np.ndarray:
    """Greedy matching of maps (M, H, W) and (M', H', W') by the mass they share."""
    pooled = torch.nn.functional.adaptive_avg_pool2d(before.float()[None], (after.shape[1], after.shape[2]))[0]
    old, new = (maps.flatten(1) / maps.flatten(1).sum(1, keepdim=True).clamp(min=1e-12) for maps in (pooled, after))
    overlap = torch.stack([torch.minimum(one, new).sum(1) for one in old]).cpu().numpy()  # (M, M')
    matched = np.full(len(after), -1)
    for flat in np.argsort(-overlap, axis=None, kind="stable"):
        i, j = np.unravel_index(flat, overlap.shape)
        if matched[j] < 0 and indices[i] not in matched:
            matched[j] = indices[i]
    unused = iter(n for n in range(len(after) + len(indices)) if n not in matched)
    return np.array([n if n >= 0 else next(unused) for n in matched])
