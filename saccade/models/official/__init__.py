"""The authors' checkpoints: one file per family, each with `matches(keys)` and `convert(state_dict, model)`.

Converters are pure functions: a dict of tensors in, a new dict out; only names and layouts change.
"""

from typing import Any

from torch import Tensor, nn

from saccade.models.official import heads, mask_rcnn, paca, resnet, sparseformer, sparseformer_v2, svit, vt_fpn
from saccade.weights.read import CheckpointError, some

BACKBONE = "backbone."  # mmdetection and mmsegmentation
# v2 before v1, whose converter also recognises v2's keys
FAMILIES = {
    "paca": paca,
    "sparseformer_btsp": sparseformer_v2,
    "sparseformer": sparseformer,
    "svit": svit,
    "resnet": resnet,
    "vt_fpn": vt_fpn,
}


def recognise(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a classifier or backbone, and the family whose official layout they have; None if it is ours."""
    if any(key.startswith(BACKBONE) for key in state_dict):
        state_dict = {k.removeprefix(BACKBONE): v for k, v in state_dict.items() if k.startswith(BACKBONE)}
    for family, layout in FAMILIES.items():
        if layout.matches(state_dict):
            return state_dict, family
    return state_dict, None


def convert(family: str, state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """An official state dict under the names of `model`."""
    try:
        return FAMILIES[family].convert(state_dict, model)
    except (RuntimeError, KeyError, IndexError) as error:
        name = getattr(model, "pretrained_cfg", {}).get("architecture", type(model).__name__)
        raise CheckpointError(
            f"expected official weights of {name}, got {family} weights of another size or options ({error})."
        ) from error


def convert_parts(state_dict: dict[str, Tensor], model: Any) -> tuple[dict[str, Tensor], str | None]:
    """Convert a backbone with its head: our own layout is unchanged, OpenMMLab's are converted part by part."""
    if not any(key.startswith(BACKBONE) for key in state_dict):
        raise CheckpointError(
            f"expected a backbone with its head, got {some(state_dict)}. Load a classifier's file into the backbone "
            "alone: saccade.load_checkpoint(model.backbone, ...)."
        )
    kind = heads.matches(state_dict)
    if kind is not None:
        head = heads.convert(kind, {k: v for k, v in state_dict.items() if k.startswith(heads.PREFIXES)})
        head = {f"head.{key}": value for key, value in head.items()}
    elif mask_rcnn.matches(state_dict):
        head = mask_rcnn.convert({k: v for k, v in state_dict.items() if k.startswith(mask_rcnn.PREFIXES)})
    else:
        return state_dict, None
    backbone, family = recognise(state_dict)
    backbone = convert(family, backbone, model.backbone_model) if family else backbone
    return {model.backbone_prefix + key: value for key, value in backbone.items()} | head, family or "timm"
