"""PaCa-ViT state dicts: names, 1x1 convolutions, and queries, keys and values that stand in one layer here."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_BLOCK = re.compile(r"^stage(\d+)\.(\d+)\.")
_CLUSTERING = re.compile(r"^(.*\.tokenizer\.clustering)\.(?:(\d+)\.)?(weight|bias)$")
_LAYERS = {1: ("to_score",), 2: ("fc", "to_score"), 3: ("conv", "mix", "to_score")}  # by the number of layers
_RENAMES = (
    (r"^patch_embed\.proj\.0\.", "stem.conv1."),
    (r"^patch_embed\.proj\.1\.", "stem.conv2."),
    (r"^patch_embed\.norm\.", "stem.norm."),
    (r"^head\.", "head.fc."),
    (r"\.norm([12])_before\.", r".norm\1."),
    (r"\.attn\.cluster_norm\.", ".tokenizer.norm."),
    (r"\.attn\.clustering\.clustering\.", ".tokenizer.clustering."),
    (r"\.mlp\.dwconv\.dwconv\.", ".mlp.conv."),
)
_MIXER = ((r"\.0\.fn\.0\.", ".conv."), (r"\.0\.fn\.2\.", ".norm1."), (r"\.1\.", ".mix."), (r"\.3\.", ".norm2."))


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the names of an official PaCa-ViT."""
    return any(_BLOCK.match(key) for key in keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The authors' names and layouts to ours, by the names alone. Their blur kernels are constants, and dropped."""
    levels = sum(bool(re.fullmatch(r"paca_teacher\.lateral\d+\.0\.weight", key)) for key in state_dict)
    named: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if key.endswith(".blur_filter"):
            continue
        if value.ndim == 4 and value.shape[2:] == (1, 1):
            value = value.flatten(1)  # their 1x1 convolutions are our linear layers
        named[_rename(key, levels)] = value
    return _fuse(_name_clustering(named))


def _rename(key: str, levels: int) -> str:
    if key.startswith("paca_teacher."):
        return _rename_teacher(key.removeprefix("paca_teacher."), levels)
    if block := _BLOCK.match(key):
        key = f"stages.{int(block[1]) - 1}.blocks.{block[2]}.{key[block.end() :]}"
    elif norm := re.match(r"^norm(\d+)\.", key):
        key = f"stages.{int(norm[1]) - 1}.norm.{key[norm.end() :]}"
    elif transition := re.match(r"^transition(\d+)\.(proj|norm)\.", key):
        layer = {"proj": "conv", "norm": "norm"}[transition[2]]
        key = f"stages.{transition[1]}.merge.{layer}.{key[transition.end() :]}"
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def _rename_teacher(key: str, levels: int) -> str:
    """Their levels count from 1, fine to coarse; our pyramid counts from 0 the way it is walked, coarse to fine."""
    part = re.match(r"^([a-z_]+)(\d+)", key)
    if part is None:
        return f"teacher.{key}"
    kind, level, rest = part[1], int(part[2]), key[part.end() :]
    if kind == "block":
        index, _, rest = rest[1:].partition(".")
        return f"teacher.stages.{level - 1}.{index}{_rename_mixer('.' + rest)}"
    if kind == "fpn":
        return f"teacher.pyramid.{levels - level}.refine{_rename_mixer(rest)}"
    if kind == "lateral":
        rest = re.sub(r"^\.2\.", ".norm.", re.sub(r"^\.0\.", ".lateral.", rest))
        return f"teacher.pyramid.{levels - level}{rest}"
    if kind == "transition":
        rest = re.sub(r"^\.2\.", ".norm.", re.sub(r"^\.0\.conv\.", ".conv.", rest))
        return f"teacher.merges.{level}{rest}"
    if kind == "to_clusters":
        return f"teacher.to_score.{level - 1}{rest}"
    return f"teacher.{key}"


def _rename_mixer(rest: str) -> str:
    for pattern, name in _MIXER:
        if re.match(pattern, rest):
            return re.sub("^" + pattern, name, rest)
    return rest


def _name_clustering(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers of a clustering are numbered there and named here; their count tells which clustering it is."""
    found = {key: match for key in named if (match := _CLUSTERING.match(key))}
    numbers: dict[str, set[int]] = {}
    for match in found.values():
        numbers.setdefault(match[1], set()).add(int(match[2] or 0))
    ours: dict[str, Tensor] = {}
    for key, value in named.items():
        if match := found.get(key):
            present = sorted(numbers[match[1]])
            layers = _LAYERS.get(len(present))
            if layers:
                key = f"{match[1]}.{layers[present.index(int(match[2] or 0))]}.{match[3]}"
        ours[key] = value
    return ours


def _fuse(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys and values of the clusters in one layer; queries too where pixels attend to pixels."""
    ours: dict[str, Tensor] = {}
    for key, value in named.items():
        block, attention, layer = key.partition(".attn.")
        name, _, kind = layer.partition(".")
        parts = [named.get(f"{block}.attn.{part}.{kind}") for part in "qkv"]
        if not attention or name not in ("q", "k", "v") or any(part is None for part in parts):
            ours[key] = value
        elif f"{block}.tokenizer.norm.weight" not in named:
            ours[f"{block}.attn.qkv.{kind}"] = torch.cat([part for part in parts if part is not None])
        elif name == "q":
            ours[f"{block}.attn.to_query.{kind}"] = value
        else:
            ours[f"{block}.attn.to_key_value.{kind}"] = torch.cat([part for part in parts[1:] if part is not None])
    return ours
