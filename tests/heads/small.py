"""Detectors small enough to run in a moment: four convolutions, narrow heads, few proposals."""

import torch
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from saccade.heads.cascade import cascade_mask_rcnn
from saccade.heads.mask_rcnn import RegionDetector, mask_rcnn, proposal_network
from saccade.heads.pyramid import Pyramid

WIDTH = 16
BUILDERS = {"mask_rcnn": mask_rcnn, "cascade_mask_rcnn": cascade_mask_rcnn}
FEW = dict(rpn_post_nms_top_n_train=30, rpn_post_nms_top_n_test=30)


class Body(nn.Module):
    """Strides 4, 8, 16, 32."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, 4 if i == 0 else 2, 1) for i in range(4))

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [images]
        for stage in self.stages:
            maps.append(stage(maps[-1]).relu())
        return maps[1:]


def detector(
    head: str = "mask_rcnn", num_classes: int = 3, size: int = 64, seed: int = 0, **settings
) -> RegionDetector:
    torch.manual_seed(seed)
    transform = GeneralizedRCNNTransform(size, 2 * size, [0.5] * 3, [0.25] * 3)
    rpn = proposal_network(WIDTH, anchor_sizes=(8, 16, 32, 64, 128), **FEW)
    options = {"box_batch_size_per_image": 16, "box_score_thresh": 0.0} | settings
    return BUILDERS[head](Pyramid(Body(), [8] * 4, WIDTH), num_classes, transform, rpn, **options)


def target(boxes: list[list[float]], labels: list[int], size: tuple[int, int]) -> dict[str, Tensor]:
    """Boxes with masks that fill them, on a picture of (height, width)."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[int(y0) : int(y1), int(x0) : int(x1)] = 1
    return {
        "boxes": torch.tensor(boxes).float().reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.long),
        "masks": masks,
    }


def check_learning(model: nn.Module, losses: dict[str, Tensor]) -> None:
    """Every parameter gets a gradient of finite numbers."""
    sum(losses.values()).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
