"""SparseFormer as a detector (arXiv 2304.03768, appendix A.1), in torchvision's protocol."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import clip_boxes_to_image, remove_small_boxes

from saccade.heads.backbone import BackboneMethods
from saccade.heads.sparse_box import SparseBoxHead
from saccade.heads.targets import DetectionTarget, check_targets
from saccade.layers.boxes import from_centre
from saccade.models.sparseformer import SparseFormer
from saccade.tasks.set_prediction import DETR, SetWeights, gather_targets, match_predictions, set_losses


class SparseDetector(BackboneMethods):
    """One box per token, without proposals or non-maximum suppression.

    Training: (list of images (3, H, W) in [0, 1], list of targets) -> dict of losses. Evaluation: list of images ->
    list of dicts with boxes (n, 4), labels (n,) and scores (n,). `auxiliary` adds DETR's auxiliary losses on the
    tokens after every block of the cortex transformer but the last, with the final regions and a matching of their own.
    """

    def __init__(
        self,
        backbone: SparseFormer,
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

    def forward(self, images: Sequence[Tensor], targets: Sequence[DetectionTarget] | None = None):
        if self.training:
            check_targets(targets, len(images), self.num_classes, masks=False)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        batch, resized = self.transform(list(images), None if targets is None else list(targets))
        if self.training:
            return self.losses(batch, resized)
        logits, boxes = self.head(*self.forward_tokens(batch))
        detections = [self.decode(*output) for output in zip(logits, boxes, batch.image_sizes, strict=True)]
        return self.transform.postprocess(detections, batch.image_sizes, sizes)

    def forward_tokens(self, batch: ImageList, passes: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Tokens (B, M, D) and regions (B, M, 4) in units of each image without its padding."""
        height, width = batch.tensors.shape[-2:]
        fractions = [(w / width, h / height) for h, w in batch.image_sizes]
        extent = torch.tensor(fractions, device=batch.tensors.device)
        tokens, regions, _ = self.backbone.forward_tokens(batch.tensors, passes, extent)
        return tokens, regions / extent.repeat(1, 2).unsqueeze(1)

    def losses(self, batch: ImageList, targets: list[DetectionTarget]) -> dict[str, Tensor]:
        passes: list[Tensor] = []
        tokens, regions = self.forward_tokens(batch, passes)
        labels = [target["labels"] for target in targets]
        boxes = []
        for target, (height, width) in zip(targets, batch.image_sizes, strict=True):
            boxes.append(target["boxes"].float() / target["boxes"].new_tensor([width, height, width, height]))
        losses = self.matched_losses(tokens, regions, labels, boxes)
        if self.auxiliary:
            depth = len(cast(nn.ModuleList, self.backbone.cortex.blocks))
            for i, earlier in enumerate(passes[-depth:-1]):
                auxiliary = self.matched_losses(earlier, regions, labels, boxes)
                losses |= {f"{name}_{i}": loss for name, loss in auxiliary.items()}
        return losses

    def matched_losses(
        self, tokens: Tensor, regions: Tensor, true_labels: list[Tensor], true_boxes: list[Tensor]
    ) -> dict[str, Tensor]:
        """Match the predictions of these tokens with the objects and compute DETR's losses."""
        logits, boxes = self.head(tokens, regions)
        matching = match_predictions(logits, boxes, true_labels, true_boxes, self.weights)
        return set_losses(logits, boxes, gather_targets(matching, true_labels, true_boxes), self.weights)

    def decode(self, logits: Tensor, boxes: Tensor, size: tuple[int, int]) -> DetectionTarget:
        """logits (P, K + 1), boxes (P, 4) in units of the image -> best class per token, by descending score."""
        scores, labels = logits.softmax(-1)[:, 1:].max(-1)
        boxes = boxes * boxes.new_tensor([size[1], size[0], size[1], size[0]])
        boxes = clip_boxes_to_image(boxes, size)
        scores, order = scores.sort(descending=True)
        boxes, labels = boxes[order], labels[order] + 1
        valid = remove_small_boxes(boxes, 1e-2)
        valid = valid[scores[valid] > self.score_thresh]
        return {"boxes": boxes[valid], "labels": labels[valid], "scores": scores[valid]}

    def dry_run(self, images: Tensor) -> None:
        """Run every layer once, without value-dependent steps, to count multiply-adds on the meta device."""
        tokens, regions, _ = self.backbone.forward_tokens(images)
        self.head(tokens, regions)


@torch.no_grad()
def init_detection_tokens(model: SparseFormer) -> None:
    """Initialise tokens for detection (appendix A.1): normal embeddings, regions of half the image, uniform centres."""
    nn.init.normal_(model.embeddings)
    centre = torch.rand_like(model.regions[:, :2])
    model.regions.copy_(from_centre(centre, torch.full_like(centre, 0.5)))
