"""PaCa-ViT state dicts: names, 1x1 convolutions, and queries, keys and values fused into one layer."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_BLOCK = re.compile(r"^stage(\d+)\.(\d+)\.")
_NORM = re.compile(r"^norm(\d+)\.")
_TRANSITION = re.compile(r"^transition(\d+)\.")
_TEACHER = re.compile(r"^paca_teacher\.([a-z_]+)(\d+)\.")
_CLUSTERING = re.compile(r"^(.*\.tokenizer\.clustering)\.(?:(\d+)\.)?(weight|bias)$")
_ATTENTION = re.compile(r"^(.*)\.attn\.([qkv])\.(weight|bias)$")
_RENAMES = (
    (r"^patch_embed\.proj\.0\.", "stem.conv1."),
    (r"^patch_embed\.proj\.1\.", "stem.conv2."),
    (r"^patch_embed\.norm\.", "stem.norm."),
    (r"^head\.", "head.fc."),
    (r"\.merge\.proj\.", ".merge.conv."),
    (r"\.norm([12])_before\.", r".norm\1."),
    (r"\.attn\.cluster_norm\.", ".tokenizer.norm."),
    (r"\.attn\.clustering\.clustering\.", ".tokenizer.clustering."),
    (r"\.mlp\.dwconv\.dwconv\.", ".mlp.conv."),
)
# Layers of their nn.Sequential modules, by kind of module.
_CLUSTERING_LAYERS = {1: ("to_score",), 2: ("fc", "to_score"), 3: ("conv", "mix", "to_score")}
_MIXER_LAYERS = {"0.fn.0.": "conv.", "0.fn.2.": "norm1.", "1.": "mix.", "3.": "norm2."}
_LATERAL_LAYERS = {"0.": "lateral.", "2.": "norm."}
_TRANSITION_LAYERS = {"0.conv.": "conv.", "2.": "norm."}


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of an official PaCa-ViT."""
    return any(_BLOCK.match(key) for key in keys)


def clusters(ours: dict[str, Tensor]) -> tuple[int, ...]:
    """The number of clusters of every stage, from converted weights; 0 for plain attention."""
    score = re.compile(r"^(?:stages\.(\d+)\.blocks\.0\.tokenizer\.clustering\.|teacher\.)to_score\.(?:(\d+)\.)?weight$")
    rows = {int(match[1] or match[2]): len(value) for key, value in ours.items() if (match := score.match(key))}
    return tuple(rows.get(stage, 0) for stage in range(4))


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert the authors' names and layouts to ours. Their blur kernels are constants, and dropped."""
    coarsest = sum(bool(re.match(r"^paca_teacher\.lateral\d+\.0\.weight$", key)) for key in state_dict)
    named: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if key.endswith(".blur_filter"):
            continue
        if value.ndim == 4 and value.shape[2:] == (1, 1):
            value = value.flatten(1)  # their 1x1 convolutions are our linear layers
        named[_rename_teacher(key, coarsest) if key.startswith("paca_teacher.") else _rename(key)] = value
    return _fuse(_name_clusterings(named))


def _rename(key: str) -> str:
    if block := _BLOCK.match(key):
        key = f"stages.{int(block[1]) - 1}.blocks.{block[2]}.{key[block.end() :]}"
    elif norm := _NORM.match(key):
        key = f"stages.{int(norm[1]) - 1}.norm.{key[norm.end() :]}"
    elif transition := _TRANSITION.match(key):  # at the end of a stage there, at the start of the next one here
        key = f"stages.{transition[1]}.merge.{key[transition.end() :]}"
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def _rename_teacher(key: str, coarsest: int) -> str:
    """Their levels count from 1, fine to coarse; our pyramid counts from 0, coarse to fine."""
    part = _TEACHER.match(key)
    if part is None:
        return key
    kind, level, suffix = part[1], int(part[2]), key[part.end() :]
    if kind == "block":
        index, _, suffix = suffix.partition(".")
        return f"teacher.stages.{level - 1}.{index}.{_layer(suffix, _MIXER_LAYERS)}"
    if kind == "transition":
        return f"teacher.merges.{level}.{_layer(suffix, _TRANSITION_LAYERS)}"
    if kind == "lateral":
        return f"teacher.pyramid.{coarsest - level}.{_layer(suffix, _LATERAL_LAYERS)}"
    if kind == "fpn":
        return f"teacher.pyramid.{coarsest - level}.refine.{_layer(suffix, _MIXER_LAYERS)}"
    return f"teacher.to_score.{level - 1}.{suffix}" if kind == "to_clusters" else key


def _layer(suffix: str, layers: dict[str, str]) -> str:
    number = next((number for number in layers if suffix.startswith(number)), "")
    return layers.get(number, "") + suffix.removeprefix(number)


def _name_clusterings(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name the numbered layers of a clustering; their number identifies the kind of clustering."""
    layer_numbers: dict[str, set[int]] = {}
    for key in named:
        if match := _CLUSTERING.match(key):
            layer_numbers.setdefault(match[1], set()).add(int(match[2] or 0))
    ours: dict[str, Tensor] = {}
    for key, value in named.items():
        if match := _CLUSTERING.match(key):
            clustering, number, kind = match.groups()
            order = sorted(layer_numbers[clustering])
            key = f"{clustering}.{_CLUSTERING_LAYERS[len(order)][order.index(int(number or 0))]}.{kind}"
        ours[key] = value
    return ours


def _fuse(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate keys and values of the clusters, and queries with them in plain self-attention."""
    ours: dict[str, Tensor] = {}
    for key, value in named.items():
        match = _ATTENTION.match(key)
        if match is None:
            ours[key] = value
            continue
        block, part, kind = match.groups()
        if f"{block}.tokenizer.norm.weight" not in named:
            layer, parts = "qkv", "qkv"
        else:
            layer, parts = ("to_query", "q") if part == "q" else ("to_key_value", "kv")
        ours[f"{block}.attn.{layer}.{kind}"] = torch.cat([named[f"{block}.attn.{part}.{kind}"] for part in parts])
    return ours
