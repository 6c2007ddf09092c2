"""State dicts of the authors' VT-FPN module (d2go): names, 1x1 convolutions, and queries, keys and values of a head
side by side."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_PREFIX = "visual_transformers."
_POSITION = re.compile(r"\.pos_encoding\.ds_conv\.(\d+)\.(\d)\.")
_RENAMES = (
    (r"^visual_transformers\.", "layers."),
    (r"\.feature_blocks\.(\d+)\.", r".projectors.\1.widen."),
    (r"\.conv_gather\.0\.", ".to_score."),
    (r"\.conv_gather\.1\.", ".score_norm.bn."),
    (r"\.conv_query\.", ".to_query."),
    (r"\.conv_key\.", ".to_key."),
    (r"\.conv_value\.", ".to_value."),
    (r"\.gather_bn\.", ".to_token.norm.bn."),
    (r"\.pos_encoding\.pos_conv\.", ".to_token.position.fc."),
    (r"\.conv_token\.", ".to_token.fc."),
    (r"\.transformer\.q_conv\.0\.", ".relation.to_query."),
    (r"\.transformer\.k_conv\.0\.", ".relation.to_key."),
    (r"\.transformer\.v_conv\.0\.", ".relation.to_value."),
    (r"\.transformer\.kqv_bn\.0\.", ".relation.norm.bn."),
    (r"\.transformer\.ff_conv\.0\.", ".relation.mlp.fc."),
    (r"\.proj_query_conv\.", ".to_query."),
    (r"\.proj_key_conv\.", ".to_key."),
    (r"\.proj_value_conv\.", ".to_value."),
    (r"\.proj_bn\.", ".norm.bn."),
)
_LAYERS = ((r"\.0\.weight$", ".linear.weight"), (r"\.1\.([a-z_]+)$", r".norm.bn.\1"))  # of their nn.Sequential modules


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of an official VT-FPN."""
    return any(key.startswith(_PREFIX) for key in keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename and reshape the tensors of the pyramid for `model`, a VTPyramid; those of its ResNet are left out."""
    expected, modules = model.state_dict(), dict(model.named_modules())
    named = {_rename(key): value for key, value in state_dict.items() if key.startswith(_PREFIX)}
    ours: dict[str, Tensor] = {}
    for key, value in named.items():
        pair = _pair(key, named)
        if pair is None:
            ours[key] = value
            continue
        fused, names = pair
        layer: Any = modules[fused.partition(".to_")[0]]
        first, second = (named[name] for name in names)
        ours[fused] = first if first.ndim == 0 else _interleave(first, second, layer.num_heads)
    return {key: _reshape(value, expected[key].shape) if key in expected else value for key, value in ours.items()}


def _rename(key: str) -> str:
    if position := _POSITION.search(key):  # ours number convolutions and norms in one list
        index = 2 * int(position[1]) + int(position[2])
        key = f"{key[: position.start()]}.to_token.position.reduce.{index}.{key[position.end() :]}"
        return key.replace(_PREFIX, "layers.")
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    for pattern, replacement in _LAYERS:
        key = re.sub(pattern, replacement, key)
    return key


def _pair(key: str, named: dict[str, Tensor]) -> tuple[str, tuple[str, str]] | None:
    """The fused tensor that `key` is a part of, and its two parts; None if it is not fused.

    Fused are queries and keys of the transformer, keys and values of a recurrent tokenizer (which has queries).
    """
    match = re.match(r"^(.*\.)to_(query|key|value)\.(.+)$", key)
    if match is None or ".projectors." in key:
        return None
    module, part, suffix = match.groups()
    first, second = ("query", "key") if ".relation." in key else ("key", "value")
    names = f"{module}to_{first}.{suffix}", f"{module}to_{second}.{suffix}"
    if part not in (first, second) or names[0] not in named:
        return None
    return f"{module}to_{first}_{second}.{suffix}", names


def _interleave(first: Tensor, second: Tensor, num_heads: int) -> Tensor:
    """Rows [head][channel] of two tensors -> rows [head][first, second][channel] of one."""
    return torch.cat([tensor.unflatten(0, (num_heads, -1)) for tensor in (first, second)], dim=1).flatten(0, 1)


def _reshape(weight: Tensor, shape: torch.Size) -> Tensor:
    """A 1x1 convolution (D, C/groups, 1) or (D, C/groups, 1, 1) as a map (D, C) or (groups, C/groups, D/groups)."""
    if weight.ndim > len(shape) == 2:
        return weight.flatten(1)
    if weight.ndim == 4 and len(shape) == 3:
        return weight.flatten(1).unflatten(0, (shape[0], -1)).transpose(1, 2).contiguous()
    return weight
