"""Segmentation heads in mmsegmentation's layout: `decode_head.*`, `auxiliary_head.*`, `neck.*` to our `head.*`."""

import re
from collections.abc import Iterable

from torch import Tensor

PREFIXES = ("decode_head.", "auxiliary_head.", "neck.")
KINDS = {"paca": "decode_head.clustering.", "upernet": "decode_head.psp_modules.", "fpn": "decode_head.scale_heads."}

_COMMON = ((r"\.bn\.", ".norm."), (r"^decode_head\.conv_seg\.", "classifier.fc."))
_RULES = {
    "paca": (
        (r"^decode_head\.convs\.", "levels."),
        (r"^decode_head\.q\.0\.", "to_query."),
        (r"^decode_head\.clustering\.0\.", "tokenizer.clustering.mix."),
        (r"^decode_head\.clustering\.1\.", "tokenizer.clustering.to_score."),
        (r"^decode_head\.k\.0\.", "to_key.fc."),
        (r"^decode_head\.k\.2\.", "to_key.norm.bn."),
        (r"^decode_head\.v\.0\.", "to_value.fc."),
        (r"^decode_head\.v\.2\.", "to_value.norm.bn."),
        (r"^decode_head\.proj\.", "mix."),
    ),
    "upernet": (
        (r"^decode_head\.psp_modules\.(\d+)\.1\.", r"pooling.levels.\1."),
        (r"^decode_head\.bottleneck\.", "pooling.fuse."),
        (r"^decode_head\.lateral_convs\.", "lateral."),
        (r"^decode_head\.fpn_convs\.", "smooth."),
        (r"^decode_head\.fpn_bottleneck\.", "fuse."),
        (r"^auxiliary_head\.convs\.0\.", "auxiliary.conv."),
        (r"^auxiliary_head\.conv_seg\.", "auxiliary.classifier.fc."),
    ),
    "fpn": (
        (r"^neck\.lateral_convs\.(\d+)\.conv\.", r"neck.fpn.inner_blocks.\1.0."),
        (r"^neck\.fpn_convs\.(\d+)\.conv\.", r"neck.fpn.layer_blocks.\1.0."),
        (r"^decode_head\.scale_heads\.", "branch.levels."),
    ),
}


def matches(keys: Iterable[str]) -> str | None:
    """The head that has these keys, or None."""
    keys = list(keys)
    return next((kind for kind, start in KINDS.items() if any(key.startswith(start) for key in keys)), None)


def convert(kind: str, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename keys to ours; a key without a rule is unchanged, and reported when it is compared with the model."""
    return {_rename(kind, key): _reshape(key, value) for key, value in state_dict.items()}


def _rename(kind: str, key: str) -> str:
    if kind == "fpn" and (scale := re.match(r"^(decode_head\.scale_heads\.\d+)\.(\d+)\.", key)):
        key = f"{scale[1]}.{int(scale[2]) // 2}.{key[scale.end() :]}"  # theirs also number the upsampling layers
    for pattern, replacement in (*_COMMON, *_RULES[kind]):
        key = re.sub(pattern, replacement, key)
    return key


def _reshape(key: str, value: Tensor) -> Tensor:
    """The score layer of the PaCa head, a 1x1 convolution there, is linear here."""
    return value.flatten(1) if key == "decode_head.clustering.1.weight" else value
