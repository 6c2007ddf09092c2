"""Object detection and instance segmentation: build detectors from a backbone and a head, in torchvision's protocol."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

import timm
import torch
from torch import nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from saccade.heads.cascade import cascade_mask_rcnn
from saccade.heads.mask_rcnn import RegionDetector, mask_rcnn, proposal_network, region_stage, set_strides
from saccade.heads.pyramid import NormLayer, Pyramid
from saccade.heads.sparse_box import SparseBoxHead
from saccade.models.checkpoint import LoadReport, load_checkpoint
from saccade.models.registry import MEAN, STD, choose, create_model
from saccade.models.sparseformer import SparseFormer
from saccade.tasks.batch_transform import BatchTransform
from saccade.tasks.segmentation import pyramid_backbone
from saccade.tasks.set_prediction import DETR, SetWeights
from saccade.tasks.sparse_detector import SparseDetector, init_detection_tokens
from saccade.weights.read import read_state_dict

REGION_HEADS: dict[str, Callable[..., RegionDetector]] = {
    "mask_rcnn": mask_rcnn,
    "cascade_mask_rcnn": cascade_mask_rcnn,
}
DETECTION_HEADS = (*REGION_HEADS, "sparse")
DETECTORS = (RegionDetector, SparseDetector)
NORM_LAYERS: dict[str, NormLayer | None] = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "group": lambda dim: nn.GroupNorm(max(1, dim // 8), dim),  # 32 groups at 256 channels
}
CLASS_LAYERS = re.compile(r"\.(cls_score|bbox_pred|mask_fcn_logits|to_class)\.")
MULTI_SCALE_SIDES = tuple(range(480, 801, 32))  # shorter sides of the 3x schedule (SViT Sec. 4.2)


def create_detector(
    backbone: str,
    head: str = "mask_rcnn",
    num_classes: int | None = None,
    pretrained: bool | str = False,
    checkpoint: str | os.PathLike | Mapping[str, Any] | None = None,
    backbone_kwargs: Mapping[str, Any] | None = None,
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    **head_kwargs: Any,
) -> RegionDetector | SparseDetector:
    """A backbone of saccade or timm with a head: "mask_rcnn", "cascade_mask_rcnn" or "sparse".

    torchvision's protocol: in training, model(images, targets) -> dict of losses; in evaluation, model(images) -> list
    of dicts of boxes, labels, scores (and masks). Labels run from 1 to `num_classes`; 0 is the background. "sparse"
    is SparseFormer's own detector: it requires a sparseformer_* backbone and predicts boxes only.

    Args:
        num_classes: 80 (COCO) by default, or that of the pretrained tag.
        pretrained: True loads the backbone's pretrained weights; a tag such as "coco" a released detector, which is
            downloaded on first use and whose class layers stay randomly initialised if `num_classes` differs.
        checkpoint: initial weights. A classifier's or an authors' file fills the backbone; a saccade detector fills
            everything but class layers of another size.
        backbone_kwargs: options of the backbone, such as drop_path_rate.
        min_size, max_size: images are resized to this shorter side, with the longer side at most max_size. Of several
            shorter sides, training samples one per image and evaluation uses the last (`MULTI_SCALE_SIDES`).
        head_kwargs: "mask_rcnn" and "cascade_mask_rcnn": masks, norm ("none", "batch" or "group" in pyramid and heads,
            for training from scratch), neck ("fpn" or "vt_fpn", with neck_kwargs), width, anchor_sizes, aspect_ratios,
            box_head ("mlp" or "conv"), box_loss (cascade: "giou" or "smooth_l1"), exact_anchors and half_pixel
            (mmdetection's anchors and RoIAlign), and torchvision's rpn_* and box_*. "sparse": num_tokens,
            detect_tokens, auxiliary, weights, score_thresh.

    Example:
        >>> detector = saccade.create_detector("svit_nano", "mask_rcnn", num_classes=3, min_size=64, max_size=96)
        >>> sorted(detector.eval()([torch.rand(3, 64, 96)])[0])
        ['boxes', 'labels', 'masks', 'scores']
    """
    choose("head", head, DETECTION_HEADS)
    if isinstance(pretrained, str):
        from saccade.tasks.released import pretrained_model  # it imports this file

        checkpoint, card = pretrained_model(backbone, head, pretrained)
        num_classes = card.num_classes if num_classes is None else num_classes
        backbone_kwargs = card.kwargs | dict(backbone_kwargs or {})
        head_kwargs = card.head_kwargs | head_kwargs
        pretrained = False
    num_classes = 80 if num_classes is None else num_classes
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}.")
    config = timm.models.get_pretrained_cfg(backbone.partition(".")[0], allow_unregistered=True)
    mean, std = (config.mean, config.std) if config is not None else (MEAN, STD)
    sizes = (min_size,) if isinstance(min_size, int) else tuple(min_size)
    transform = BatchTransform(sizes, max_size, list(mean), list(std))  # type: ignore[arg-type] # declared as int
    kwargs = dict(backbone_kwargs or {})
    if head == "sparse":
        return _sparse_detector(backbone, num_classes, transform, pretrained, checkpoint, kwargs, **head_kwargs)
    features = pyramid_backbone(backbone, pretrained, kwargs)
    model = _region_detector(features, head, num_classes, transform, **head_kwargs)
    if checkpoint is not None:
        load_detector_weights(model, features, checkpoint)
    return model


def _region_detector(
    backbone: Any,
    head: str,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    norm: str = "none",
    width: int = 256,
    neck: str = "fpn",
    neck_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RegionDetector:
    choose("norm", norm, tuple(NORM_LAYERS))
    choose("neck", neck, ("fpn", "vt_fpn"))
    choose("box_head", settings.get("box_head", "mlp"), ("mlp", "conv"))
    choose("box_loss", settings.get("box_loss", "giou"), ("giou", "smooth_l1"))
    rpn_options = _option_names(proposal_network)
    _check_options(head, settings, rpn_options + _option_names(region_stage) + _option_names(REGION_HEADS[head]))
    channels = backbone.feature_info.channels()
    pyramid = Pyramid(backbone, channels, width, NORM_LAYERS[norm], neck, **dict(neck_kwargs or {}))
    rpn = proposal_network(width, **{key: value for key, value in settings.items() if key in rpn_options})
    head_settings = {key: value for key, value in settings.items() if key not in rpn_options}
    model = REGION_HEADS[head](pyramid, num_classes, transform, rpn, norm=NORM_LAYERS[norm], **head_settings)
    set_strides(model, backbone.feature_info.reduction())
    return model


def _sparse_detector(
    name: str,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    pretrained: bool,
    checkpoint: str | os.PathLike | Mapping[str, Any] | None,
    kwargs: dict[str, Any],
    num_tokens: int = 400,
    detect_tokens: int = 100,
    weights: SetWeights | Sequence[float] = DETR,
    auxiliary: bool = False,
    score_thresh: float = 0.0,
) -> SparseDetector:
    if detect_tokens > num_tokens:
        raise ValueError(f"detect_tokens ({detect_tokens}) must not exceed num_tokens ({num_tokens}).")
    with torch.device("meta"):
        if not hasattr(create_model(name), "forward_tokens"):
            raise ValueError(
                f"expected a sparseformer_* backbone for the sparse head, got {name}. Choose another head or backbone."
            )
    model = create_model(name, pretrained, **({"num_classes": 0, "num_tokens": num_tokens} | kwargs))
    model = cast(SparseFormer, model)  # has forward_tokens
    init_detection_tokens(model)
    head = SparseBoxHead(model.num_features, num_classes, detect_tokens)
    detector = SparseDetector(model, head, transform, num_classes, SetWeights(*weights), auxiliary, score_thresh)
    if checkpoint is not None:
        load_detector_weights(detector, model, checkpoint)
    model.prune_intermediate_layers(prune_norm=True)  # detection does not use the classifier's norm
    return detector


def load_detector_weights(
    model: nn.Module, backbone: nn.Module, source: str | os.PathLike | Mapping[str, Any]
) -> LoadReport:
    """Load a saccade detector, except class layers of another size; load any other checkpoint into the backbone."""
    state_dict, ours = read_state_dict(source), model.state_dict()
    if not any(key in ours for key in state_dict if key.startswith("backbone.")):
        return load_checkpoint(backbone, state_dict)
    compatible = {
        key: value
        for key, value in state_dict.items()
        if key not in ours or value.shape == ours[key].shape or not CLASS_LAYERS.search(key)
    }
    return load_checkpoint(model, compatible, strict=False)


def _option_names(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is not parameter.empty]


def _check_options(head: str, given: Mapping[str, Any], options: Sequence[str]) -> None:
    """Raise TypeError for an unknown option: torchvision's **kwargs would ignore a misspelt one."""
    for name in given:
        if name not in options:
            close = get_close_matches(name, options, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Options: {', '.join(options)}."
            raise TypeError(f"{head} has no option {name!r}.{hint}")
