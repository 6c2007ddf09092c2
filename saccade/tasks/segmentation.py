"""Semantic segmentation: build segmenters from a backbone and a dense head; loss and metric."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from saccade._extras import require
from saccade.heads.backbone import BackboneMethods
from saccade.heads.fpn import FPNHead
from saccade.heads.paca import PaCaHead
from saccade.heads.sparse import SparseHead
from saccade.heads.upernet import UperNetHead
from saccade.heads.vt_fpn import vt_fpn_head
from saccade.layers.conv import resize_like
from saccade.layers.grid import channels_last, check_images
from saccade.models.checkpoint import LoadReport, load_checkpoint
from saccade.models.official import convert_parts
from saccade.models.registry import choose, create_model
from saccade.models.sparseformer import SparseFormer
from saccade.tasks.losses import IGNORE_INDEX, class_loss, dice_loss
from saccade.tasks.sparse_detector import init_detection_tokens
from saccade.weights.read import read_state_dict

PYRAMID_HEADS: dict[str, Callable[..., nn.Module]] = {
    "vt_fpn": vt_fpn_head,
    "fpn": FPNHead,
    "paca": PaCaHead,
    "upernet": UperNetHead,
}
SEGMENTATION_HEADS = (*PYRAMID_HEADS, "sparse")

# Backbone options for segmentation: PaCa has 200 clusters wherever it has 100 for classification (PaCa Sec. 4.3).
_PACA, _PACA_EC = {"clusters": (200, 200, 200, 0)}, {"clusters": (200, 200, 200, 200)}
BACKBONE_KWARGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("paca_tiny", "paca_small", "paca_base", "paca_mlp_small"), _PACA),
    **dict.fromkeys(("paca_ec_tiny", "paca_ec_small", "paca_ec_base"), _PACA_EC),
}


class Segmenter(BackboneMethods):
    """A backbone and a dense head: images -> logits of the same size.

    Args:
        backbone: images -> the head's input: features, fine to coarse, or tokens, regions and features.
        head: -> logits (B, K, h, w), and auxiliary logits of the same shape or None.
        auxiliary_weight: weight of the auxiliary loss, 0.4 in the PaCa head and UperNet.
        ignore_index: value of unlabelled mask pixels.
    """

    class_layers = ("head.classifier.fc.", "head.auxiliary.classifier.fc.", "head.tokenizer.clustering.to_score.")

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        num_classes: int,
        in_chans: int = 3,
        auxiliary_weight: float = 0.4,
        ignore_index: int = IGNORE_INDEX,
    ):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.auxiliary_weight = auxiliary_weight
        self.ignore_index = ignore_index
        self.pixel_loss: Callable[..., Tensor] = pixel_loss  # training may replace it by one with other options

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K, H, W)."""
        check_images(images, self.in_chans)
        logits, _ = self.head(self.backbone(channels_last(images)))
        return resize_like(logits, images)

    def loss(self, images: Tensor, masks: Tensor) -> dict[str, Tensor]:
        """images (B, 3, H, W), masks (B, H, W) of class indices -> losses by name; minimise their sum."""
        return self.losses_and_logits(images, masks)[0]

    def losses_and_logits(self, images: Tensor, masks: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The losses, and the logits (B, K, h, w) at the head's resolution."""
        check_images(images, self.in_chans)
        logits, auxiliary = self.head(self.backbone(channels_last(images)))
        losses = {"pixels": self.pixel_loss(logits, masks, self.ignore_index)}
        if auxiliary is not None:
            losses["auxiliary"] = self.auxiliary_weight * self.pixel_loss(auxiliary, masks, self.ignore_index)
        return losses, logits

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Adapt the backbone's tensors as the backbone does, such as another number of clusters or tokens."""
        prefix, backbone = self.backbone_prefix, self.backbone_model
        if not hasattr(backbone, "adapt_checkpoint"):
            return state_dict, {}
        inner = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        adapted, new = backbone.adapt_checkpoint(inner)
        outer = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
        outer |= {prefix + key: value for key, value in adapted.items()}
        return outer, {prefix + key: reason for key, reason in new.items()}


class TokenBackbone(FeatureGetterNet):
    """A SparseFormer that returns tokens, regions and early features instead of timm's feature pyramid."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """images (B, 3, H, W) -> tokens (B, M, D), regions (B, M, 4), features (B, C, h, w)."""
        return cast(SparseFormer, self.model).forward_tokens(images)


def create_segmenter(
    backbone: str,
    head: str,
    num_classes: int | None = None,
    pretrained: bool | str = False,
    backbone_kwargs: Mapping[str, Any] | None = None,
    head_kwargs: Mapping[str, Any] | None = None,
    auxiliary_weight: float = 0.4,
    ignore_index: int = IGNORE_INDEX,
    checkpoint: str | os.PathLike | Mapping[str, Any] | None = None,
) -> Segmenter:
    """A backbone of saccade or timm with a head: "vt_fpn", "fpn", "paca", "upernet" or "sparse".

    Evaluation: model(images (B, 3, H, W)) -> logits (B, K, H, W). Training: model.loss(images, masks) -> dict of
    losses. "sparse" requires a sparseformer_* backbone; the other heads read the last four feature maps of any model.

    Args:
        num_classes: 150 (ADE20K) by default, or that of the pretrained tag.
        pretrained: True loads the backbone's pretrained weights; a tag loads an embedded segmenter ("camvid") or a
            released one ("ade20k", downloaded on first use), whose class layers stay randomly initialised if
            `num_classes` differs.
        backbone_kwargs: options of the backbone; they override `BACKBONE_KWARGS`, the papers' options for segmentation.
        checkpoint: initial weights, of a classifier for the backbone or of a segmenter; see `load_segmenter_weights`.

    Example:
        >>> segmenter = saccade.create_segmenter("paca_nano", "paca", num_classes=5)
        >>> segmenter.eval()(torch.rand(1, 3, 64, 96)).shape
        torch.Size([1, 5, 64, 96])
    """
    choose("head", head, SEGMENTATION_HEADS)
    if isinstance(pretrained, str):
        from saccade.tasks.released import pretrained_model  # it imports this file

        checkpoint, card = pretrained_model(backbone, head, pretrained)
        num_classes = num_classes or card.num_classes
        backbone_kwargs = card.kwargs | dict(backbone_kwargs or {})
        head_kwargs = card.head_kwargs | dict(head_kwargs or {})
        pretrained = False
    num_classes = num_classes or 150
    kwargs = BACKBONE_KWARGS.get(backbone, {}) | dict(backbone_kwargs or {})
    options = dict(head_kwargs or {})
    in_chans = kwargs.get("in_chans", 3)
    if head == "sparse":
        features = token_backbone(backbone, pretrained, kwargs)
        module: nn.Module = SparseHead(features.model.stem_dim, features.model.num_features, num_classes, **options)
    else:
        features = pyramid_backbone(backbone, pretrained, kwargs)
        module = PYRAMID_HEADS[head](features.feature_info.channels(), num_classes, **options)
    model = Segmenter(features, module, num_classes, in_chans, auxiliary_weight, ignore_index)
    if checkpoint is not None:
        load_segmenter_weights(model, checkpoint)
    return model


def load_segmenter_weights(model: Segmenter, source: str | os.PathLike | Mapping[str, Any]) -> LoadReport:
    """Load a classifier into the backbone, or a segmenter into both parts except class layers of another size."""
    state_dict = read_state_dict(source)
    if not any(key.startswith("backbone.") for key in state_dict):
        return load_checkpoint(model.backbone, state_dict)
    converted, ours = convert_parts(state_dict, model)[0], model.state_dict()
    class_keys = [key for key in converted if key.startswith(model.class_layers) and key in ours]
    compatible = {
        key: value for key, value in converted.items() if key not in class_keys or value.shape == ours[key].shape
    }
    return load_checkpoint(model, compatible, strict=False)


def pyramid_backbone(name: str, pretrained: bool = False, kwargs: Mapping[str, Any] | None = None) -> Any:
    """timm's `features_only` model with the last four feature maps, mostly strides 4, 8, 16 and 32.

    Untyped: timm's feature extractors share no base class that declares `feature_info`.
    """
    options = {"features_only": True, "out_indices": (-4, -3, -2, -1)} | dict(kwargs or {})
    if name.startswith("sparseformer"):
        options.setdefault("dense", True)  # trained with the head
    try:  # the getter returns (B, C, H, W) for every model that has forward_intermediates
        return create_model(name, pretrained, feature_cls="getter", **options)
    except AttributeError:
        return create_model(name, pretrained, **options)


def token_backbone(name: str, pretrained: bool = False, kwargs: Mapping[str, Any] | None = None) -> Any:
    """A SparseFormer wrapped as `TokenBackbone`.

    With another number of tokens than for classification they start as in detection: regions of half the image,
    uniform over it (SparseFormer A.2).
    """
    if not name.startswith("sparseformer"):
        raise ValueError(
            f"expected a sparseformer_* backbone for the sparse head, got {name}. Choose another head or backbone."
        )
    options = {"features_only": True} | dict(kwargs or {})
    model: Any = create_model(name, pretrained, feature_cls=TokenBackbone, **options)
    with torch.device("meta"):
        classifier: Any = create_model(name)
    if len(model.model.regions) != len(classifier.regions):
        init_detection_tokens(model.model)
    return model


def pixel_loss(
    logits: Tensor,
    masks: Tensor,
    ignore_index: int = IGNORE_INDEX,
    weight: Tensor | None = None,
    focal_gamma: float = 0.0,
    dice: float = 0.0,
) -> Tensor:
    """Mean loss over labelled pixels, at the masks' size: logits (B, K, h, w), masks (B, H, W) -> ().

    Cross-entropy with class weights (K,), or focal loss, plus `dice` times the Dice loss.
    """
    if masks.ndim != 3 or masks.shape[0] != logits.shape[0]:
        raise ValueError(f"expected masks (B, H, W) for {logits.shape[0]} images, got {tuple(masks.shape)}.")
    masks = masks.long()
    logits = F.interpolate(logits.float(), masks.shape[1:], mode="bilinear", align_corners=False)
    loss = class_loss(logits, masks, weight, focal_gamma, ignore_index=ignore_index)
    return loss + dice * dice_loss(logits, masks, ignore_index) if dice else loss


def segmentation_metric(num_classes: int, ignore_index: int = IGNORE_INDEX, sync: bool = True) -> Any:
    """torchmetrics' confusion matrix of labels (B, H, W) and masks (B, H, W); `sync` reduces over all processes.

    `SegmentationScores.from_confusion(metric.compute())` has the metrics.
    """
    tm = require("torchmetrics", "train")
    return tm.classification.MulticlassConfusionMatrix(
        num_classes, ignore_index=ignore_index, validate_args=False, sync_on_compute=sync
    )


class SegmentationScores(NamedTuple):
    """Metrics of a confusion matrix. A class that occurs in neither masks nor predictions is excluded."""

    miou: float  # mean over classes of intersection / union
    macc: float  # mean over the classes in the masks of their pixel accuracy
    aacc: float  # accuracy over all labelled pixels
    iou: list[float | None]  # per class; None if the class is in neither masks nor predictions
    acc: list[float | None]  # per class; None if the class is not in the masks

    @classmethod
    def from_confusion(cls, confusion: Tensor) -> "SegmentationScores":
        """confusion (K, K): pixels of the whole dataset by true class and predicted class."""
        confusion = confusion.double().cpu()
        hits, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        iou, acc = hits / (true + predicted - hits), hits / true  # 0 / 0 is nan
        aacc = hits.sum() / true.sum()
        return cls(iou.nanmean().item(), acc.nanmean().item(), aacc.item(), _nan_to_none(iou), _nan_to_none(acc))


def _nan_to_none(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
