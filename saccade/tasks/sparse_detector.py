"""SparseFormer itself as a detector (arXiv 2304.03768, appendix A.1), in torchvision's protocol."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import clip_boxes_to_image, remove_small_boxes

from saccade.heads.sparse_box import SparseBoxHead
from saccade.heads.targets import Target, check_targets
from saccade.layers.boxes import from_centre
from saccade.tasks.set_prediction import DETR, SetWeights, join, match, set_losses


class SparseDetector(nn.Module):
    """No proposals, no NMS: one box a token (SF-67).

    Training: (list of images (3, H, W) in [0, 1], list of targets) -> dict of losses. Evaluation: list of images ->
    list of dicts with boxes (n, 4), labels (n,) and scores (n,). `auxiliary` also teaches the tokens behind the
    earlier blocks of the cortex transformer, whose regions are already the last ones, for the same objects.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: SparseBoxHead,
        transform: GeneralizedRCNNTransform,
        num_classes: int,
        weights: SetWeights = DETR,
        auxiliary: bool = False,
        score_thresh: float = 0.0,
    ):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.transform = transform
        self.num_classes = num_classes
        self.weights = weights
        self.auxiliary = auxiliary
        self.score_thresh = score_thresh

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None):
        if self.training:
            check_targets(targets, len(images), self.num_classes, masks=False)
        sizes = [tuple(image.shape[-2:]) for image in images]
        batch, fitted = self.transform(list(images), None if targets is None else list(targets))
        if self.training:
            return self.losses(batch, fitted)
        logits, boxes = self.head(*self.look(batch))
        found = [self.decode(*one) for one in zip(logits, boxes, batch.image_sizes, strict=True)]
        return self.transform.postprocess(found, batch.image_sizes, sizes)

    def look(self, batch: ImageList, passes: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Tokens (B, M, D) and their regions (B, M, 4) in units of each image without its padding."""
        height, width = batch.tensors.shape[-2:]
        shares = [(w / width, h / height) for h, w in batch.image_sizes]
        extent = torch.tensor(shares, device=batch.tensors.device)
        tokens, regions, _ = self.backbone.forward_tokens(batch.tensors, passes, extent)
        return tokens, regions / extent.repeat(1, 2).unsqueeze(1)

    def losses(self, batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        passes: list[Tensor] = []
        tokens, regions = self.look(batch, passes)
        labels = [target["labels"] for target in targets]
        true = []
        for target, (height, width) in zip(targets, batch.image_sizes, strict=True):
            true.append(target["boxes"].float() / target["boxes"].new_tensor([width, height, width, height]))
        logits, boxes = self.head(tokens, regions)
        matched = join(match(logits, boxes, labels, true, self.weights), labels, true)
        losses = set_losses(logits, boxes, matched, self.weights)
        if self.auxiliary:
            earlier = passes[-len(self.backbone.cortex.blocks) : -1]
            for i, seen in enumerate(earlier):
                also = set_losses(*self.head(seen, regions), matched, self.weights)
                losses |= {f"{name}_{i}": value for name, value in also.items()}
        return losses

    def decode(self, logits: Tensor, boxes: Tensor, size: tuple[int, int]) -> Target:
        """logits (P, K + 1), boxes (P, 4) in units of the image -> each token's best class, the surest first."""
        scores, labels = logits.softmax(-1)[:, 1:].max(-1)
        boxes = boxes * boxes.new_tensor([size[1], size[0], size[1], size[0]])
        boxes = clip_boxes_to_image(boxes, size)
        scores, order = scores.sort(descending=True)
        boxes, labels = boxes[order], labels[order] + 1
        keep = remove_small_boxes(boxes, 1e-2)
        keep = keep[scores[keep] > self.score_thresh]
        return {"boxes": boxes[keep], "labels": labels[keep], "scores": scores[keep]}

    @property
    def backbone_model(self) -> nn.Module:
        return self.backbone

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def dry_run(self, images: Tensor) -> None:
        """All that multiplies, once: for counting on the meta device."""
        tokens, regions, _ = self.backbone.forward_tokens(images)
        self.head(tokens, regions)


@torch.no_grad()
def scatter_tokens(model: nn.Module) -> None:
    """New embeddings from the normal distribution, regions of half the image anywhere on it (SF-67)."""
    nn.init.normal_(model.embeddings)
    centre = torch.rand_like(model.regions[:, :2])
    model.regions.copy_(from_centre(centre, torch.full_like(centre, 0.5)))
