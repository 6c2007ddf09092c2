"""Small detectors for tests: four convolutions as backbone, narrow heads, few proposals."""

import torch
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from saccade.heads.cascade import cascade_mask_rcnn
from saccade.heads.mask_rcnn import RegionDetector, mask_rcnn, proposal_network
from saccade.heads.pyramid import Pyramid

WIDTH = 16
BUILDERS = {"cascade_mask_rcnn": cascade_mask_rcnn, "mask_rcnn": mask_rcnn}
FEW_PROPOSALS = dict(rpn_post_nms_top_n_train=30, rpn_post_nms_top_n_test=30)
SMALL, LARGE = (48, 64), (80, 64)  # height, width


class Backbone(nn.Module):
    """Strides 4, 8, 16, 32."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, 4 if i == 0 else 2, 1) for i in range(4))

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [images]
        for stage in self.stages:
            maps.append(stage(maps[-1]).relu())
        return maps[1:]


def make_detector(
    head: str = "mask_rcnn", num_classes: int = 3, size: int = 64, seed: int = 0, **settings
) -> RegionDetector:
    torch.manual_seed(seed)
    transform = GeneralizedRCNNTransform(size, 2 * size, [0.5] * 3, [0.25] * 3)
    rpn = proposal_network(WIDTH, anchor_sizes=(8, 16, 32, 64, 128), **FEW_PROPOSALS)
    options = {"box_batch_size_per_image": 16, "box_score_thresh": 0.0} | settings
    return BUILDERS[head](Pyramid(Backbone(), [8] * 4, WIDTH), num_classes, transform, rpn, **options)


def random_images(*sizes: tuple[int, int]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.rand(3, *size, generator=rng) for size in sizes]


def make_target(boxes: list[list[float]], labels: list[int], size: tuple[int, int]) -> dict[str, Tensor]:
    """Boxes and masks that fill them, on an image of (height, width)."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[int(y0) : int(y1), int(x0) : int(x1)] = 1
    return {
        "boxes": torch.tensor(boxes).float().reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.long),
        "masks": masks,
    }


def crowd(count: int = 100) -> list[list[float]]:
    """Overlapping boxes of 9 px on a grid of 6 px."""
    return [[6.0 * (i % 10), 6.0 * (i // 10), 6.0 * (i % 10) + 9, 6.0 * (i // 10) + 9] for i in range(count)]


def fill_zero_parameters(model: nn.Module) -> nn.Module:
    """Replace zero-initialised weights, which block the gradient of the layers before them, by random ones."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def zero_gradients(model: nn.Module, losses: dict[str, Tensor]) -> list[str]:
    """Names of parameters whose gradient is zero everywhere; every gradient must exist and be finite."""
    torch.stack(list(losses.values())).sum().backward()
    names = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not parameter.grad.any():
            names.append(name)
    return names
