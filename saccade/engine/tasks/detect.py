"""Training of detectors: images and objects, the detector's losses, average precision."""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade._extras import require
from saccade.data.loader import ObjectBatch, ObjectEvalLoader, ObjectLoader
from saccade.data.open import EMBEDDED_IMAGES
from saccade.data.sources.base import DataError
from saccade.data.transforms.custom import with_custom
from saccade.data.transforms.objects import TrainObjects, unpack_masks
from saccade.engine.loaders import Loaders, Partition, open_sources
from saccade.engine.module import TrainingModule, TrainingSetup, assemble_with_head
from saccade.engine.recipe import Data, Recipe
from saccade.inference.compile import compile_options
from saccade.reports.page import Thumbnail, image_figure
from saccade.tasks.detection import RegionDetector, SparseDetector, create_detector
from saccade.tasks.detection_drawing import draw_detections
from saccade.tasks.evaluators import Evaluation, ObjectEvaluator, has_masks

_logger = logging.getLogger(__name__)
SCENE_SIZE = 128  # side of the embedded scenes, unless data.image_size is set


class DetectionModule(TrainingModule):
    """A training run of an object detector, with or without instance masks."""

    monitor = "box_ap"
    train_metrics = ("loss",)
    val_metrics = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")
    class_metric = "Box AP"
    num_examples = 6
    model: RegionDetector | SparseDetector

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Crops already have their final size; this torchvision switch skips resizing in training.
        transform: Any = self.model.transform  # torchvision annotates neither the attribute nor the switch
        transform._skip_resize = self.recipe.augment.crop == "resized"

    @classmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        for module in ("pycocotools.cocoeval", *(("scipy.optimize",) if recipe.model.head == "sparse" else ())):
            require(module, "train")  # fail now, not at the first validation or matching
        sources = open_sources(recipe, recipe.data.image_size or SCENE_SIZE)
        head_kwargs = dict(recipe.model.head_kwargs)
        if recipe.model.head != "sparse" and not sources.train.has_masks:
            if head_kwargs.setdefault("masks", False):
                raise DataError("model.head_kwargs has masks=true, but the objects have no masks. Set masks=false.")
            _logger.warning("the objects have no masks: training boxes only.")
        sizes = detector_sizes(recipe.data, recipe.augment.crop)

        def create(*args: Any, head_kwargs: dict[str, Any], **kwargs: Any) -> nn.Module:
            return create_detector(*args, **kwargs, **head_kwargs)

        return assemble_with_head(recipe, sources, create, sizes.get("min_size"), sizes | head_kwargs)

    def compile_model(self, mode: str | None) -> None:
        """Compile the backbone only: the shapes after it change with the number of objects."""
        self.model.backbone_model.compile(**compile_options(mode))

    def make_loaders(self, partition: Partition) -> Loaders:
        augment, order = self.recipe.augment, partition.order
        options = [getattr(augment, name) for name in ("crop", "resize", "flip", "vertical_flip", "jitter")]
        transform = TrainObjects(self.recipe.data.image_size, *options)
        workers, pin = partition.workers, partition.pin
        return Loaders(
            order,
            ObjectLoader(self.sources.train, with_custom(augment.custom, transform), order, workers, pin),
            ObjectEvalLoader(self.sources.val, partition.images, workers, order.rank, order.world_size, pin),
        )

    def prepare(self, batch: ObjectBatch) -> tuple[list[Tensor], Any]:
        """uint8 images -> images in [0, 1], which the detector resizes and normalises; masks are unpacked."""
        targets = []
        for image, target in zip(batch.images, batch.labels, strict=True):
            masks = {"masks": unpack_masks(target["masks"], image.shape[-1])} if "masks" in target else {}
            targets.append(target | masks)
        return [image.float() / 255 for image in batch.images], targets

    def loss_and_metrics(self, images: list[Tensor], targets: Any) -> tuple[Tensor]:
        losses = self.model(images, targets)
        return (torch.stack([loss.float() for loss in losses.values()]).sum(),)

    def make_evaluator(self, sync: bool) -> ObjectEvaluator:
        source = self.sources.val
        return ObjectEvaluator(source, has_masks(self.model, source), self.recipe.data.max_detections, sync=sync)

    def evaluate(self, model: nn.Module, device: torch.device) -> Evaluation:
        evaluation = super().evaluate(model, device)
        self.evaluator.coco.write(self.out)
        return evaluation

    def example(self, model: nn.Module, values: dict[str, Any]) -> list[Thumbnail]:
        """Return detections and ground truth."""
        source, index = self.sources.val, values["indices"]
        image = source.read(index)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(next(model.parameters()).device)
        objects = source.objects(index, image.size)
        truth = {"boxes": torch.from_numpy(objects.boxes), "labels": torch.from_numpy(objects.labels)}
        truth["scores"] = torch.ones(len(objects.labels))
        if objects.masks is not None:
            truth["masks"] = torch.from_numpy(objects.masks)[:, None]
        captions = (f"prediction, {100 * values['quality']:.0f} % correct", "ground truth")
        drawn = zip((model([pixels.float() / 255])[0], truth), captions, strict=True)
        return [
            image_figure(draw_detections(image, boxes, source.classes, names=False), source.name(index), text, side=320)
            for boxes, text in drawn
        ]


def detector_sizes(data: Data, crop: str) -> dict[str, int]:
    """Options `min_size` and `max_size` of the detector for data.image_size; empty for its own, COCO's 800 and 1333.

    The longer side is at most 5 / 3 of the shorter one, or with crop="resized", which scales it, the image size.
    """
    size = data.image_size or (SCENE_SIZE if data.path == EMBEDDED_IMAGES else None)
    return {} if size is None else {"min_size": size, "max_size": size if crop == "resized" else round(size * 5 / 3)}
