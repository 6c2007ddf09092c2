"""Training of segmenters: images and masks, pixel losses, mIoU."""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.data.loader import Batch, EvalLoader, FileLoader
from saccade.data.sources.class_names import flipped_classes
from saccade.data.sources.masks import load_pair, read_pair
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.custom import with_custom
from saccade.data.transforms.mask import EvalPair, TrainPair
from saccade.data.transforms.mask_batch import PairAugment
from saccade.engine.loaders import Loaders, Partition, memory_loaders, open_sources
from saccade.engine.module import TrainingModule, TrainingSetup, assemble_with_head
from saccade.engine.recipe import Recipe
from saccade.inference.compile import compile_options
from saccade.reports.page import Thumbnail, image_figure
from saccade.tasks.evaluators import MaskEvaluator
from saccade.tasks.losses import balanced_weights
from saccade.tasks.segmentation import IGNORE_INDEX, Segmenter, create_segmenter, pixel_loss
from saccade.tasks.segmentation_drawing import class_colours, overlay_labels
from saccade.tasks.segmentation_inference import InferenceOptions

CROP_SIZE = 512  # side of a training crop, unless data.image_size is set


class SegmentationModule(TrainingModule):
    """A training run of a semantic segmenter."""

    monitor = "miou"
    train_metrics = ("loss", "aacc")
    val_metrics = ("loss", "miou", "macc", "aacc")
    class_metric = "IoU"
    num_examples = 4
    model: Segmenter

    def __init__(self, *args: Any):
        super().__init__(*args)
        recipe, classes = self.recipe, self.sources.classes
        regularize, weight = recipe.regularize, self.class_weights()
        if weight is not None or regularize.focal_gamma or regularize.dice:
            options = {"weight": weight, "focal_gamma": regularize.focal_gamma, "dice": regularize.dice}
            self.model.pixel_loss = partial(pixel_loss, **options)
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

    def balanced_weights(self) -> Tensor:
        """Return weights (K,) by the number of pixels in up to 256 masks."""
        source, num_classes = self.sources.train, len(self.sources.classes)
        counts = torch.zeros(256, dtype=torch.long)
        for index in np.linspace(0, len(source) - 1, min(256, len(source)), dtype=int).tolist():
            counts += torch.from_numpy(source.read_mask(index)).flatten().bincount(minlength=256)
        return balanced_weights(counts[:num_classes])

    def make_evaluator(self, sync: bool) -> MaskEvaluator:
        data = self.recipe.data
        inference = InferenceOptions(window=data.val_window)
        return MaskEvaluator(self.sources.classes, self.preprocess, data.val_size, inference, sync)

    def example(self, model: nn.Module, values: dict[str, Any]) -> list[Thumbnail]:
        """Return image, prediction and ground truth."""
        source, colours = self.sources.val, class_colours(len(self.sources.classes))
        image, mask = read_pair(source, values["indices"])
        array, name = np.array(image), source.name(values["indices"])
        pixels = torch.from_numpy(array).permute(2, 0, 1)[None].to(next(model.parameters()).device)
        labels = self.make_evaluator(sync=False).predict(model, pixels, mask.shape).argmax(1)[0].byte().cpu().numpy()
        predicted, truth = (Image.fromarray(overlay_labels(array, classes, colours)) for classes in (labels, mask))
        captions = ("image", f"prediction, {100 * values['quality']:.1f} % correct", "ground truth")
        drawn = zip((image, predicted, truth), captions, strict=True)
        return [image_figure(figure, name, caption, side=320) for figure, caption in drawn]


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
