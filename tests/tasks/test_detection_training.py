"""Training of every detection head: losses fall, and a few images are overfitted."""

import pytest
import torch

import saccade
from saccade.data.open import find_object_splits, open_split
from saccade.data.sources.base import Subset
from saccade.data.sources.objects import ObjectSource
from saccade.data.synthetic.scenes import SceneObjects
from saccade.data.transforms.objects import EvalObjects
from saccade.tasks.coco_metric import CocoMetric
from tests.data.coco_files import MINI

REGIONS = dict(norm="group", anchor_sizes=(8, 16, 32, 64, 96), rpn_batch_size_per_image=64)
TINY = dict(width=16, rpn_post_nms_top_n_train=30, rpn_post_nms_top_n_test=30, box_batch_size_per_image=16)
SMALL = dict(width=64, rpn_post_nms_top_n_train=100, rpn_post_nms_top_n_test=100, box_batch_size_per_image=32)


def make(head: str, num_classes: int, size: int, **options):
    torch.manual_seed(0)
    if head == "sparse":
        return saccade.create_detector(
            "sparseformer_nano", "sparse", num_classes, min_size=size, max_size=size, num_tokens=49, **options
        )
    return saccade.create_detector("svit_nano", head, num_classes, min_size=size, max_size=size, **REGIONS, **options)


def fit(model: torch.nn.Module, source: ObjectSource, steps: int, rate: float = 1e-3) -> list[float]:
    """Train on all images in every step; return the losses."""
    transform = EvalObjects()
    images_read = [source.read(i) for i in range(len(source))]
    pairs = [transform(image, source.objects(i, image.size)) for i, image in enumerate(images_read)]
    images, targets = [pixels / 255 for pixels, _ in pairs], [target for _, target in pairs]
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    model.train()
    losses = []
    for _ in range(steps):
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def average_precision(model: torch.nn.Module, source: ObjectSource, masks: bool) -> dict[str, float]:
    metric = CocoMetric(source.ground_truth(), source.category_ids, masks)
    transform = EvalObjects()
    for i in range(len(source)):
        image = source.read(i)
        pixels, _ = transform(image, source.objects(i, image.size))
        with torch.no_grad():
            metric.update(model.eval()([pixels / 255]), [int(source.image_ids[i])])
    return metric.compute()


@pytest.mark.parametrize("head", ["mask_rcnn", "cascade_mask_rcnn", "sparse"])
def test_losses_fall(head):
    options = dict(detect_tokens=12) if head == "sparse" else TINY
    losses = fit(make(head, 10, 64, **options), SceneObjects(2, 64), steps=15)
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "steps", "options"),
    [("mask_rcnn", 120, SMALL), ("cascade_mask_rcnn", 80, SMALL), ("sparse", 200, dict(detect_tokens=20))],
)
def test_four_scenes_are_overfitted(head, steps, options):
    scenes = SceneObjects(4, 96)
    model = make(head, 10, 96, **options)
    fit(model, scenes, steps)
    metrics = average_precision(model, scenes, masks=head != "sparse")
    assert metrics["box_ap50"] > 0.95
    if head != "sparse":
        assert metrics["mask_ap50"] > 0.9


@pytest.mark.slow
def test_three_images_of_nuclei_are_overfitted():
    nuclei = Subset(open_split(MINI, "test_rle", find=find_object_splits), [1, 2, 4])
    options = SMALL | dict(box_batch_size_per_image=64, rpn_post_nms_top_n_train=200, rpn_post_nms_top_n_test=200)
    model = make("mask_rcnn", 1, 160, **options)
    fit(model, nuclei, 60)
    metrics = average_precision(model, nuclei, masks=True)
    assert metrics["box_ap50"] > 0.85
    assert metrics["mask_ap50"] > 0.85
