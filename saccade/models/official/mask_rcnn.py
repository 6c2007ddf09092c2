"""Mask R-CNN in mmdetection's layout: `neck.*`, `rpn_head.*`, `roi_head.*` to torchvision's names.

mmdetection's last class is the background, torchvision's the first; torchvision also predicts a box and a mask for it,
which nothing reads, and which are zero here. Anchors of a cell, coordinates of a box, its standard deviations and the
flattened 7x7 cells have the same order in both. `heads/mmdet.py` has the anchors and the RoIAlign to run it with.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

PREFIXES = ("neck.", "rpn_head.", "roi_head.")
_RENAMES = (
    (r"^neck\.lateral_convs\.(\d+)\.conv\.", r"backbone.fpn.inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d+)\.conv\.", r"backbone.fpn.layer_blocks.\1.0."),
    (r"^rpn_head\.rpn_conv\.", "rpn.head.conv.0.0."),
    (r"^rpn_head\.rpn_cls\.", "rpn.head.cls_logits."),
    (r"^rpn_head\.rpn_reg\.", "rpn.head.bbox_pred."),
    (r"^roi_head\.bbox_head\.shared_fcs\.0\.", "roi_heads.box_head.fc6."),
    (r"^roi_head\.bbox_head\.shared_fcs\.1\.", "roi_heads.box_head.fc7."),
    (r"^roi_head\.bbox_head\.fc_cls\.", "roi_heads.box_predictor.cls_score."),
    (r"^roi_head\.bbox_head\.fc_reg\.", "roi_heads.box_predictor.bbox_pred."),
    (r"^roi_head\.mask_head\.convs\.(\d+)\.conv\.", r"roi_heads.mask_head.\1.0."),
    (r"^roi_head\.mask_head\.upsample\.", "roi_heads.mask_predictor.conv5_mask."),
    (r"^roi_head\.mask_head\.conv_logits\.", "roi_heads.mask_predictor.mask_fcn_logits."),
)


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of a two-stage detector of mmdetection."""
    return any(key.startswith("roi_head.bbox_head.fc_cls.") for key in keys)


def convert(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename keys and reorder classes; a key without a rule is unchanged, and reported when it is compared."""
    return {_rename(key): _with_background_first(key, value) for key, value in state_dict.items()}


def _rename(key: str) -> str:
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def _with_background_first(key: str, value: Tensor) -> Tensor:
    if ".fc_cls." in key:
        return torch.cat([value[-1:], value[:-1]])
    rows = 4 if ".fc_reg." in key else 1 if ".conv_logits." in key else 0
    return torch.cat([torch.zeros_like(value[:rows]), value]) if rows else value
