"""Training of segmenters: images and masks, pixel losses, mIoU."""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.data.decode.image import BadImage
from saccade.data.loader import Batch, EvalLoader, FileLoader
from saccade.data.sources.class_names import flipped_classes
from saccade.data.sources.masks import load_pair, read_pair
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.mask import EvalPair, TrainPair
from saccade.data.transforms.mask_batch import PairAugment
from saccade.engine.loaders import Loaders, Partition, memory_loaders, open_sources, with_custom
from saccade.engine.module import TrainingModule, TrainingSetup, assemble_with_head
from saccade.engine.recipe import Recipe
from saccade.engine.report import classes_section, image_figure, image_grid, legend
from saccade.engine.tasks.evaluate_segmenter import MaskEvaluation, evaluate_segmenter
from saccade.inference.compile import compile_options
from saccade.tasks.predict import preprocess_images, segment_batch
from saccade.tasks.segmentation import (
    IGNORE_INDEX,
    SegmentationScores,
    Segmenter,
    create_segmenter,
    pixel_loss,
    segmentation_metric,
)
from saccade.tasks.segmentation_drawing import class_colours, overlay_labels
from saccade.tasks.segmentation_inference import InferenceOptions

CROP_SIZE = 512  # side of a training crop, unless data.image_size is set
NUM_EXAMPLES = 4  # images per section of the report


class SegmentationModule(TrainingModule):
    """A training run of a semantic segmenter."""

    monitor = "miou"
    train_metrics = ("loss", "aacc")
    val_metrics = ("loss", "miou", "macc", "aacc")
    model: Segmenter

    def __init__(self, *args: Any):
        super().__init__(*args)
        recipe, classes = self.recipe, self.sources.classes
        self.metric = segmentation_metric(len(classes))
        regularize, weight = recipe.regularize, self.class_weights(self.count_pixels)
        if weight is not None or regularize.focal_gamma or regularize.dice:
            options = {"weight": weight, "focal_gamma": regularize.focal_gamma, "dice": regularize.dice}
            self.model.pixel_loss = partial(pixel_loss, **options)
        self.inference = InferenceOptions(window=recipe.data.val_window)
        self.augment = None
        if self.sources.train_memory is not None:
            options = augment_options(recipe, self.preprocess.size, classes)
            self.augment = PairAugment(mean=self.preprocess.mean, std=self.preprocess.std, **options)

    @classmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        size = recipe.data.image_size or CROP_SIZE
        sources = open_sources(recipe, size)
        head_kwargs = dict(recipe.model.head_kwargs)
        if recipe.regularize.dropout:
            head_kwargs["dropout"] = recipe.regularize.dropout
        return assemble_with_head(recipe, sources, create_segmenter, size, head_kwargs)

    def compile_model(self, mode: str | None) -> None:
        """Compile backbone and head separately: training calls `loss`, not `forward`."""
        self.model.backbone.compile(**compile_options(mode))
        self.model.head.compile(**compile_options(mode))

    def make_loaders(self, partition: Partition) -> Loaders:
        cached, sources, order = memory_loaders(self.sources, partition), self.sources, partition.order
        if cached is not None:
            return cached
        options = augment_options(self.recipe, self.preprocess.size, sources.classes)
        transform = with_custom(self.recipe.augment.custom, TrainPair(mean=self.preprocess.mean, **options))
        workers, pin = partition.workers, partition.pin
        train = FileLoader(sources.train, transform, order, workers, pin, load_pair)
        # Single images, because their sizes may differ
        val = EvalLoader(sources.val, EvalPair(), 1, workers, order.rank, order.world_size, pin, load_pair)
        return Loaders(order, train, val)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """uint8 images and masks -> augmented, normalised images (B, 3, S, S) and masks (B, S, S)."""
        with torch.autocast(self.device.type, enabled=False):
            if self.augment is not None:
                images, masks = self.augment(batch.images, batch.labels, self.rng)
            else:
                images = normalize(batch.images.float() / 255, self.preprocess.mean, self.preprocess.std)
                masks = batch.labels.long()
            return images.contiguous(memory_format=torch.channels_last), masks

    def loss_and_metrics(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        losses, logits = self.model.losses_and_logits(images, masks)
        with torch.no_grad():
            sampled = masks[:, ::4, ::4]  # every 16th pixel is enough for the log
            valid = sampled != IGNORE_INDEX
            labels = F.interpolate(logits, valid.shape[1:], mode="nearest-exact").argmax(1)
            accuracy = ((labels == sampled) & valid).sum() / valid.sum().clamp(min=1)
        return torch.stack(list(losses.values())).sum(), accuracy

    def count_pixels(self) -> Tensor:
        """Return the number of pixels per class (K,) in up to 256 masks."""
        source, num_classes = self.sources.train, len(self.sources.classes)
        counts = torch.zeros(256, dtype=torch.long)
        for index in np.linspace(0, len(source) - 1, min(256, len(source)), dtype=int).tolist():
            counts += torch.from_numpy(source.read_mask(index)).flatten().bincount(minlength=256)
        return counts[:num_classes]

    def reset_metrics(self) -> None:
        self.metric.reset()

    def update_metrics(self, model: nn.Module, batch: Batch) -> None:
        masks = batch.labels.long()
        images = preprocess_images(batch.images, self.preprocess, self.recipe.data.val_size)
        probabilities = segment_batch(model, images, masks.shape[1:], self.inference, self.sources.classes)
        self.metric.update(probabilities.argmax(1), masks)
        self.add_val_loss(pixel_loss(probabilities.clamp(min=1e-9).log(), masks), len(masks))

    def compute_metrics(self) -> dict[str, float]:
        scores = SegmentationScores.from_confusion(self.metric.compute())
        percent = {name: 100 * getattr(scores, name) for name in self.val_metrics if name != "loss"}
        return {"loss": self.mean_val_loss()} | percent

    def evaluate(self, model: nn.Module, device: torch.device) -> MaskEvaluation:
        batches, classes, shorter = self.full_validation(device), self.sources.classes, self.recipe.data.val_size
        return evaluate_segmenter(
            model, batches, classes, self.preprocess, shorter, self.inference, device, self.autocast_dtype
        )

    def report_sections(self, model: nn.Module, evaluation: MaskEvaluation) -> list[tuple[str, str]]:
        percent = [None if value is None else 100 * value for value in evaluation.scores.iou]
        order = evaluation.accuracy.argsort()
        worst, best = order[:NUM_EXAMPLES], order[-NUM_EXAMPLES:].flip(0)
        return [
            ("Classes", classes_section(percent, evaluation.confusion, self.sources.classes, "IoU")),
            ("Worst predictions", legend(self.sources.classes) + self.examples(model, evaluation, worst)),
            ("Best predictions", self.examples(model, evaluation, best)),
        ]

    @torch.inference_mode()
    def examples(self, model: nn.Module, evaluation: MaskEvaluation, rows: Tensor) -> str:
        """Return image, prediction and ground truth side by side, for rows of the evaluation."""
        source, colours = self.sources.val, class_colours(len(self.sources.classes))
        device = next(model.parameters()).device
        figures = []
        for row in rows.tolist():
            index = int(evaluation.indices[row])
            try:
                image, mask = read_pair(source, index)
            except BadImage:
                continue
            array, name = np.array(image), source.name(index)
            pixels = torch.from_numpy(array).permute(2, 0, 1)[None].to(device)
            images = preprocess_images(pixels, self.preprocess, self.recipe.data.val_size)
            probabilities = segment_batch(model, images, mask.shape, self.inference, self.sources.classes)
            labels = probabilities.argmax(1)[0].byte().cpu().numpy()
            accuracy = f"prediction, {100 * float(evaluation.accuracy[row]):.1f} % correct"
            figures.append(image_figure(image, name, "image", 320))
            for labelled, caption in ((labels, accuracy), (mask, "ground truth")):
                figures.append(
                    image_figure(Image.fromarray(overlay_labels(array, labelled, colours)), name, caption, 320)
                )
        return image_grid(figures, 300)


def augment_options(recipe: Recipe, size: int, classes: list[str]) -> dict[str, Any]:
    """Return the options shared by `TrainPair` (single images) and `PairAugment` (batches)."""
    augment = recipe.augment
    return {
        "size": size,
        "base": recipe.data.base_size,
        "scale": tuple(augment.resize),
        "max_class_fraction": augment.max_class_fraction,
        "flip": augment.flip,
        "distort": augment.distort,
        "flipped_classes": flipped_classes(classes),
    }
