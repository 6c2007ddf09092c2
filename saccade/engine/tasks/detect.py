"""Training of detectors: images and objects, the detector's losses, average precision."""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade._extras import require
from saccade.data.decode.image import BadImage
from saccade.data.loader import ObjectBatch, ObjectEvalLoader, ObjectLoader
from saccade.data.open import EMBEDDED_IMAGES
from saccade.data.sources.base import DataError
from saccade.data.transforms.objects import TrainObjects, unpack_masks
from saccade.engine.loaders import Loaders, Partition, open_sources, with_custom
from saccade.engine.module import TrainingModule, TrainingSetup, assemble_with_head
from saccade.engine.recipe import Data, Recipe
from saccade.engine.report import classes_section, image_figure, image_grid
from saccade.engine.tasks.evaluate_detector import ObjectEvaluation, coco_metric, evaluate_detector
from saccade.inference.compile import compile_options
from saccade.tasks.coco_metric import CocoMetric
from saccade.tasks.detection import RegionDetector, SparseDetector, create_detector
from saccade.tasks.detection_drawing import draw_detections

_logger = logging.getLogger(__name__)
SCENE_SIZE = 128  # side of the embedded scenes, unless data.image_size is set
NUM_EXAMPLES = 6  # images per section of the report


class DetectionModule(TrainingModule):
    """A training run of an object detector, with or without instance masks."""

    monitor = "box_ap"
    train_metrics = ("loss",)
    val_metrics = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")
    model: RegionDetector | SparseDetector

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Crops already have their final size; this torchvision switch skips resizing in training.
        transform: Any = self.model.transform  # torchvision annotates neither the attribute nor the switch
        transform._skip_resize = self.recipe.augment.crop == "resized"
        self._coco: CocoMetric | None = None

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
        transform = TrainObjects(
            self.recipe.data.image_size,
            augment.crop,
            augment.resize,
            augment.flip,
            augment.vertical_flip,
            augment.jitter,
        )
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

    @property
    def coco(self) -> CocoMetric:
        """The metric, created on first use because it reads all annotations."""
        if self._coco is None:
            self._coco = coco_metric(self.model, self.sources.val, self.recipe.data.max_detections)
        return self._coco

    def reset_metrics(self) -> None:
        self.coco.reset()

    def update_metrics(self, model: nn.Module, batch: ObjectBatch) -> None:
        images, _ = self.prepare(batch)
        ids = self.sources.val.image_ids[batch.indices.cpu().numpy()].tolist()
        self.coco.update(model(images), ids)

    def compute_metrics(self) -> dict[str, float]:
        self.coco.gather()
        values, kinds = self.coco.compute(by_size=False), self.coco.per_class  # kinds: "box", perhaps "mask"
        return {name: 100 * values.get(name, 0.0) for name in self.val_metrics if name.partition("_")[0] in kinds}

    def evaluate(self, model: nn.Module, device: torch.device) -> ObjectEvaluation:
        batches, source = self.full_validation(device), self.sources.val
        evaluation = evaluate_detector(model, batches, source, self.coco, device, self.autocast_dtype)
        evaluation.coco.write(self.out)
        return evaluation

    def report_sections(self, model: nn.Module, evaluation: ObjectEvaluation) -> list[tuple[str, str]]:
        order = evaluation.quality.argsort()
        return [
            ("Classes", classes_section(evaluation.per_class, None, self.sources.classes, "Box AP")),
            ("Worst predictions", self.examples(model, evaluation, order[:NUM_EXAMPLES])),
            ("Best predictions", self.examples(model, evaluation, order[-NUM_EXAMPLES:].flip(0))),
        ]

    @torch.inference_mode()
    def examples(self, model: nn.Module, evaluation: ObjectEvaluation, rows: Tensor) -> str:
        """Return detections and ground truth side by side, for rows of the evaluation."""
        source, device = self.sources.val, next(model.parameters()).device
        figures = []
        for row in rows.tolist():
            index = int(evaluation.indices[row])
            try:
                image = source.read(index)
            except BadImage:
                continue
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device)
            prediction = model([pixels.float() / 255])[0]
            objects = source.objects(index, image.size)
            truth = {
                "boxes": torch.from_numpy(objects.boxes),
                "labels": torch.from_numpy(objects.labels),
                "scores": torch.ones(len(objects.labels)),
            }
            if objects.masks is not None:
                truth["masks"] = torch.from_numpy(objects.masks)[:, None]
            text = f"prediction, {100 * float(evaluation.quality[row]):.0f} % correct"
            for detections, caption in ((prediction, text), (truth, "ground truth")):
                drawn = draw_detections(image, detections, source.classes, names=False)
                figures.append(image_figure(drawn, source.name(index), caption, 320))
        return image_grid(figures, 300)


def detector_sizes(data: Data, crop: str) -> dict[str, int]:
    """Options `min_size` and `max_size` of the detector for data.image_size; empty for its own, COCO's 800 and 1333.

    The longer side is at most 5 / 3 of the shorter one, or with crop="resized", which scales it, the image size.
    """
    size = data.image_size or (SCENE_SIZE if data.path == EMBEDDED_IMAGES else None)
    return {} if size is None else {"min_size": size, "max_size": size if crop == "resized" else round(size * 5 / 3)}
