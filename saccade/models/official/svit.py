"""SViT (STViT) state dicts: names, 1x1 convolutions, and the row order of the attention projection."""

import re
from collections.abc import Iterable

from torch import Tensor, nn

from saccade.layers.attention import SelfAttention

# The stem is one nn.Sequential of four (convolution, GELU, BatchNorm) triples.
_STEM = re.compile(r"^patch_embed\.proj\.(\d+)\.")
# Patch merging ends a stage there and starts the next one here.
_MERGE = re.compile(r"^layers\.(\d+)\.downsample\.proj\.([01])\.")
_RENAMES = (
    (r"^layers\.", "stages."),
    (r"\.pos_embed\.conv\.", ".position."),
    (r"\.norm1\.norm\.", ".norm1."),
    (r"\.attn\.stoken_refine\.", ".attn.attention."),
    (r"\.mlp2\.conv\.conv\.", ".mlp.conv."),
    (r"\.mlp2\.", ".mlp."),
    (r"\.gamma_([12])$", r".scale\1.gamma"),
    (r"^proj\.", "projection.conv."),
    (r"^norm\.", "projection.norm."),
    (r"^head\.", "head.fc."),
)


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of an official SViT."""
    return any(".stoken_refine." in key for key in keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert the authors' names and layouts to ours. Their one-hot fold kernels are constants, and dropped."""
    heads = {name: module.num_heads for name, module in model.named_modules() if isinstance(module, SelfAttention)}
    ours: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if key.endswith((".fold.weights", ".unfold.weights")):
            continue
        name = _rename(key)
        attention, _, row = name.partition(".qkv.")
        if row and attention in heads:
            value = value.unflatten(0, (heads[attention], 3, -1)).transpose(0, 1).flatten(0, 2)
        if key.endswith((".gamma_1", ".gamma_2")):
            value = value.flatten()
        elif value.ndim == 4 and value.shape[2:] == (1, 1) and not name.startswith("projection."):
            value = value.flatten(1)  # their 1x1 convolutions are our linear layers
        ours[name] = value
    return ours


def _rename(key: str) -> str:
    if stem := _STEM.match(key):
        index = int(stem[1])
        return f"stem.{index // 3}.{'conv' if index % 3 == 0 else 'norm'}.{key[stem.end() :]}"
    if merge := _MERGE.match(key):
        return f"stages.{int(merge[1]) + 1}.merge.{('conv', 'norm')[int(merge[2])]}.{key[merge.end() :]}"
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key
