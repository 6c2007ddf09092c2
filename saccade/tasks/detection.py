"""Object detection and instance segmentation: a backbone under a head, in torchvision's protocol."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import timm
import torch
from torch import nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from saccade.heads.cascade import cascade_mask_rcnn
from saccade.heads.mask_rcnn import RegionDetector, mask_rcnn, proposal_network, region_stage
from saccade.heads.pyramid import Norm, Pyramid
from saccade.heads.sparse_box import SparseBoxHead
from saccade.models.checkpoint import LoadReport, load_checkpoint, read_state_dict
from saccade.models.registry import MEAN, STD, choose, create_model
from saccade.tasks.batch_transform import BatchTransform
from saccade.tasks.segmentation import pyramid_backbone
from saccade.tasks.set_prediction import DETR, SetWeights
from saccade.tasks.sparse_detector import SparseDetector, scatter_tokens

REGION_HEADS: dict[str, Callable[..., RegionDetector]] = {
    "mask_rcnn": mask_rcnn,
    "cascade_mask_rcnn": cascade_mask_rcnn,
}
HEADS = (*REGION_HEADS, "sparse")
DETECTORS = (RegionDetector, SparseDetector)
NORMS: dict[str, Norm | None] = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "group": lambda dim: nn.GroupNorm(max(1, dim // 8), dim),  # 32 groups of 256 channels, as usual
}
CLASS_LAYERS = re.compile(r"\.(cls_score|bbox_pred|mask_fcn_logits|to_class)\.")
MULTI_SCALE = tuple(range(480, 801, 32))  # shorter sides of the papers' 3x schedule


def create_detector(
    backbone: str,
    head: str = "mask_rcnn",
    num_classes: int = 80,
    pretrained: bool = False,
    checkpoint: str | os.PathLike | Mapping[str, Any] | None = None,
    backbone_kwargs: Mapping[str, Any] | None = None,
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    **head_kwargs: Any,
) -> RegionDetector | SparseDetector:
    """A backbone by name, saccade's or timm's, under a head: "mask_rcnn", "cascade_mask_rcnn" or "sparse".

    In torchvision's protocol: training, model(images, targets) -> dict of losses; evaluation, model(images) -> list of
    dicts of boxes, labels, scores (and masks). `num_classes` counts kinds of objects, their labels run from 1; 0 is
    the background. "sparse" is SparseFormer itself, so it wants a sparseformer_* and finds boxes only.

    Args:
        checkpoint: what to start from: a classifier's or an authors' file fills the backbone, a detector of saccade's
            all but the layers of other classes. `pretrained` asks timm for the backbone's own.
        backbone_kwargs: options of the backbone, such as drop_path_rate.
        min_size, max_size: images are resized to this shorter side, the longer at most max_size. Several shorter
            sides: one is drawn for every training image, the last is for evaluation (`MULTI_SCALE`).
        head_kwargs: "mask_rcnn" and "cascade_mask_rcnn": masks, norm ("none", "batch" or "group": in pyramid and heads,
            for training from scratch), width, anchor_sizes, aspect_ratios, box_head ("mlp" or "conv"), box_loss
            (cascade: "giou" or "smooth_l1"), and torchvision's rpn_* and box_*. "sparse": num_tokens, detect_tokens,
            auxiliary, weights, score_thresh.
    """
    choose("head", head, HEADS)
    if num_classes < 1:
        raise ValueError(f"a detector needs at least one kind of objects, got num_classes={num_classes}.")
    about = timm.models.get_pretrained_cfg(backbone.partition(".")[0], allow_unregistered=True)
    mean, std = (about.mean, about.std) if about is not None else (MEAN, STD)
    sizes = (min_size,) if isinstance(min_size, int) else tuple(min_size)
    transform = BatchTransform(sizes, max_size, list(mean), list(std))  # type: ignore[arg-type]
    kwargs = dict(backbone_kwargs or {})
    if head == "sparse":
        return _sparse_detector(backbone, num_classes, transform, pretrained, checkpoint, kwargs, **head_kwargs)
    body = pyramid_backbone(backbone, pretrained, kwargs)
    model = _region_detector(body, head, num_classes, transform, **head_kwargs)
    if checkpoint is not None:
        start_from(model, body, checkpoint)
    return model


def _region_detector(
    body: nn.Module,
    head: str,
    num_classes: int,
    transform: GeneralizedRCNNTransform,
    norm: str = "none",
    width: int = 256,
    **settings: Any,
) -> RegionDetector:
    choose("norm", norm, tuple(NORMS))
    choose("box_head", settings.get("box_head", "mlp"), ("mlp", "conv"))
    choose("box_loss", settings.get("box_loss", "giou"), ("giou", "smooth_l1"))
    for_anchors = _names(proposal_network)
    known = for_anchors + _names(region_stage) + _names(REGION_HEADS[head])
    _check_options(head, settings, known)
    backbone = Pyramid(body, body.feature_info.channels(), width, NORMS[norm])
    rpn = proposal_network(width, **{key: value for key, value in settings.items() if key in for_anchors})
    rest = {key: value for key, value in settings.items() if key not in for_anchors}
    return REGION_HEADS[head](backbone, num_classes, transform, rpn, norm=NORMS[norm], **rest)


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
        raise ValueError(f"of {num_tokens} tokens, {detect_tokens} cannot detect: lower detect_tokens.")
    with torch.device("meta"):
        if not hasattr(create_model(name), "forward_tokens"):
            raise ValueError(f"the sparse head reads tokens with regions, which {name} has not: use a sparseformer_*.")
    model = create_model(name, pretrained, **({"num_classes": 0, "num_tokens": num_tokens} | kwargs))
    scatter_tokens(model)
    head = SparseBoxHead(model.num_features, num_classes, detect_tokens)
    detector = SparseDetector(model, head, transform, num_classes, SetWeights(*weights), auxiliary, score_thresh)
    if checkpoint is not None:
        start_from(detector, model, checkpoint)
    model.prune_intermediate_layers(prune_norm=True)  # the mean over tokens has no say in detection
    return detector


def start_from(model: nn.Module, body: nn.Module, source: str | os.PathLike | Mapping[str, Any]) -> LoadReport:
    """A detector's weights into both parts, but for the layers of other classes; any other file's into the backbone."""
    state_dict, ours = read_state_dict(source), model.state_dict()
    if not any(key in ours for key in state_dict if key.startswith("backbone.")):
        return load_checkpoint(body, state_dict)
    fitting = {
        key: value
        for key, value in state_dict.items()
        if key not in ours or value.shape == ours[key].shape or not CLASS_LAYERS.search(key)
    }
    return load_checkpoint(model, fitting, strict=False)


def _names(function: Callable[..., Any]) -> list[str]:
    return [name for name, about in inspect.signature(function).parameters.items() if about.default is not about.empty]


def _check_options(head: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """torchvision would swallow a misspelt option."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(known)}."
            raise TypeError(f"{head} has no option {name!r}.{hint}")
