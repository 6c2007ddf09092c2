"""Semantic segmentation: a backbone, a dense head, the loss a pixel, and what the logits are worth."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from saccade import weights
from saccade._extras import require
from saccade.heads.fpn import FPNHead
from saccade.heads.paca import PaCaHead
from saccade.heads.sparse import SparseHead
from saccade.heads.upernet import UperNetHead
from saccade.heads.vt_fpn import vt_fpn_head
from saccade.layers.conv import resize_like
from saccade.layers.grid import channels_last, check_images
from saccade.models.card import Card, read_card
from saccade.models.checkpoint import LoadReport, convert_parts, load_checkpoint, read_state_dict
from saccade.models.registry import choose, create_model

IGNORE_INDEX = 255  # masks: not labelled, learns nothing and counts for nothing
PYRAMID_HEADS: dict[str, Callable[..., nn.Module]] = {
    "vt_fpn": vt_fpn_head,
    "fpn": FPNHead,
    "paca": PaCaHead,
    "upernet": UperNetHead,
}
HEADS = (*PYRAMID_HEADS, "sparse")

# What the papers change in a backbone when it segments: PaCa has 200 clusters wherever it had 100 (PACA-53).
_PACA, _PACA_EC = {"clusters": (200, 200, 200, 0)}, {"clusters": (200, 200, 200, 200)}
BACKBONE_KWARGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("paca_tiny", "paca_small", "paca_base", "paca_mlp_small"), _PACA),
    **dict.fromkeys(("paca_ec_tiny", "paca_ec_small", "paca_ec_base"), _PACA_EC),
}


class Segmenter(nn.Module):
    """A backbone and a head: images in, logits of their own size out.

    Args:
        backbone: images -> what the head reads: a pyramid of maps, fine to coarse, or tokens with their regions.
        head: -> logits (B, K, h, w) and a second opinion of the same kind, or None.
        auxiliary_weight: of the loss on the second opinion (0.4 in PaCa's head and in UperNet).
        ignore_index: the value of mask pixels that are not labelled.
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

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K, H, W)."""
        check_images(images, self.in_chans)
        logits, _ = self.head(self.backbone(channels_last(images)))
        return resize_like(logits, images)

    def loss(self, images: Tensor, masks: Tensor) -> dict[str, Tensor]:
        """images (B, 3, H, W), masks (B, H, W) of class numbers -> what to add up and minimise, by name."""
        return self.losses_and_logits(images, masks)[0]

    def losses_and_logits(self, images: Tensor, masks: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The losses, and the logits (B, K, h, w) as the head gives them."""
        check_images(images, self.in_chans)
        logits, second = self.head(self.backbone(channels_last(images)))
        losses = {"pixels": pixel_loss(logits, masks, self.ignore_index)}
        if second is not None:
            losses["auxiliary"] = self.auxiliary_weight * pixel_loss(second, masks, self.ignore_index)
        return losses, logits

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone_model.set_grad_checkpointing(enable)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names the backbone exempts from weight decay."""
        return {self._place + name for name in getattr(self.backbone_model, "no_weight_decay", set)()}

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """As the backbone adapts its own: another number of clusters or tokens stays new."""
        prefix, trunk = self._place, self.backbone_model
        if not hasattr(trunk, "adapt_checkpoint"):
            return state_dict, {}
        inner = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        kept, new = trunk.adapt_checkpoint(inner)
        outer = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
        return outer | {prefix + key: value for key, value in kept.items()}, {prefix + k: why for k, why in new.items()}

    @property
    def backbone_model(self) -> nn.Module:
        """The backbone itself, without timm's wrapper."""
        return self.backbone.model if isinstance(self.backbone, FeatureGetterNet) else self.backbone

    @property
    def _place(self) -> str:
        """Where the trunk's tensors are found."""
        return "backbone." if self.backbone_model is self.backbone else "backbone.model."


class TokenBackbone(FeatureGetterNet):
    """What a SparseFormer saw, in place of timm's pyramid: tokens, their regions, and the map they looked at."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """images (B, 3, H, W) -> tokens (B, M, D), regions (B, M, 4), features (B, C, h, w)."""
        return self.model.forward_tokens(images)


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
    """A backbone by name, saccade's or timm's, under a head: "vt_fpn", "fpn", "paca", "upernet" or "sparse".

    Eval: model(images (B, 3, H, W)) -> logits (B, K, H, W). Training: model.loss(images, masks) -> dict of losses.
    "sparse" reads tokens with regions, so it stands on SparseFormer; the others read the last four maps of any
    backbone. `BACKBONE_KWARGS` has what the papers change in a backbone for this task; `backbone_kwargs` wins.
    `pretrained=True` starts from the backbone's own weights; a tag, as in "camvid", takes a whole embedded segmenter.
    `num_classes` is 150 (ADE20K's), or what the tag knows; with another number the layers of the classes stay new.
    `checkpoint` is what to start from: a classifier's weights for the backbone, or a segmenter's, see `start_from`.
    """
    choose("head", head, HEADS)
    if isinstance(pretrained, str):
        checkpoint, card = _embedded_segmenter(backbone, head, pretrained)
        num_classes = num_classes or card.num_classes
        backbone_kwargs = card.kwargs | dict(backbone_kwargs or {})
        head_kwargs = card.head_kwargs | dict(head_kwargs or {})
        pretrained = False
    num_classes = num_classes or 150
    kwargs = BACKBONE_KWARGS.get(backbone, {}) | dict(backbone_kwargs or {})
    options = dict(head_kwargs or {})
    in_chans = kwargs.get("in_chans", 3)
    if head == "sparse":
        trunk = token_backbone(backbone, pretrained, kwargs)
        module: nn.Module = SparseHead(trunk.model.stem_dim, trunk.model.num_features, num_classes, **options)
    else:
        trunk = pyramid_backbone(backbone, pretrained, kwargs)
        module = PYRAMID_HEADS[head](trunk.feature_info.channels(), num_classes, **options)
    model = Segmenter(trunk, module, num_classes, in_chans, auxiliary_weight, ignore_index)
    if checkpoint is not None:
        start_from(model, checkpoint)
    return model


def _embedded_segmenter(backbone: str, head: str, tag: str) -> tuple[Path, Card]:
    known = {name: path for name, path in weights.embedded().items() if "+" in name}
    path = known.get(f"{backbone}+{head}.{tag}")
    if path is None:
        raise ValueError(
            f"saccade ships no weights {backbone}+{head}.{tag}. It brings: {', '.join(known) or 'no segmenter'}. Other "
            "segmenters: train one (docs/segmentation.md), or give the authors' file as checkpoint=."
        )
    return path, read_card(path)


def start_from(model: Segmenter, source: str | os.PathLike | Mapping[str, Any]) -> LoadReport:
    """A classifier's weights into the backbone; a segmenter's into both, but for the layers of other classes."""
    state_dict = read_state_dict(source)
    if not any(key.startswith("backbone.") for key in state_dict):
        return load_checkpoint(model.backbone, state_dict)
    found, ours = convert_parts(state_dict, model)[0], model.state_dict()
    other = [key for key in found if key.startswith(model.class_layers) and key in ours]
    kept = {key: value for key, value in found.items() if key not in other or value.shape == ours[key].shape}
    return load_checkpoint(model, kept, strict=False)


def pyramid_backbone(name: str, pretrained: bool = False, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The last four maps of a model, as timm's `features_only` gives them; mostly strides 4, 8, 16 and 32."""
    options = {"features_only": True, "out_indices": (-4, -3, -2, -1)} | dict(kwargs or {})
    try:  # the getter gives (B, C, H, W) from every model that knows its intermediates
        return create_model(name, pretrained, feature_cls="getter", **options)
    except AttributeError:
        return create_model(name, pretrained, **options)


def token_backbone(name: str, pretrained: bool = False, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """A SparseFormer that hands over its tokens."""
    if not name.startswith("sparseformer"):
        raise ValueError(f"the sparse head reads tokens with regions, which {name} has not: use a sparseformer_*.")
    options = {"features_only": True, "dense": False} | dict(kwargs or {})
    return create_model(name, pretrained, feature_cls=TokenBackbone, **options)


def pixel_loss(logits: Tensor, masks: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Cross-entropy at the masks' size, over the labelled pixels: logits (B, K, h, w), masks (B, H, W) -> ().

    A batch without a labelled pixel has loss 0, not 0 / 0.
    """
    if masks.ndim != 3 or masks.shape[0] != logits.shape[0]:
        raise ValueError(f"expected masks (B, H, W) for {logits.shape[0]} images, got {tuple(masks.shape)}.")
    masks = masks.long()
    logits = F.interpolate(logits.float(), masks.shape[1:], mode="bilinear", align_corners=False)
    total = F.cross_entropy(logits, masks, ignore_index=ignore_index, reduction="sum")
    return total / (masks != ignore_index).sum().clamp(min=1)


def segmentation_metric(num_classes: int, ignore_index: int = IGNORE_INDEX, sync: bool = True) -> Any:
    """torchmetrics' confusion matrix of class numbers (B, H, W) and masks (B, H, W); with `sync`, over all processes.

    `SegmentationScores.from_confusion(metric.compute())` reads it.
    """
    tm = require("torchmetrics", "train")
    return tm.classification.MulticlassConfusionMatrix(
        num_classes, ignore_index=ignore_index, validate_args=False, sync_on_compute=sync
    )


class SegmentationScores(NamedTuple):
    """What a confusion matrix of pixels says; a class that neither masks nor answers know does not count."""

    miou: float  # mean over classes of intersection / union
    macc: float  # mean over the masks' classes of the share of their pixels that were found
    aacc: float  # share of all labelled pixels that were found
    iou: list[float | None]  # per class; None where there was nothing to find and nothing found
    acc: list[float | None]

    @classmethod
    def from_confusion(cls, confusion: Tensor) -> "SegmentationScores":
        """confusion (K, K), true class by answered class, in pixels of the whole set (VT-73, SF-75)."""
        confusion = confusion.double().cpu()
        hits, true, answered = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        iou, acc = hits / (true + answered - hits), hits / true  # 0 / 0 is nan
        aacc = hits.sum() / true.sum()
        return cls(_mean(iou), _mean(acc), aacc.item(), _plain(iou), _plain(acc))


def _mean(values: Tensor) -> float:
    return values.nanmean().item()


def _plain(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]
