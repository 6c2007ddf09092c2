"""Training of segmenters: images and masks, pixel losses, mIoU."""

from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from saccade.data.decode.image import BadImage
from saccade.data.loader import Batch, EvalLoader, FileLoader, MemoryEvalLoader, seed_all
from saccade.data.open import open_train_and_val_masks
from saccade.data.sources.base import DataError
from saccade.data.sources.class_names import flipped_classes
from saccade.data.sources.masks import MaskSource, load_pair, read_pair
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.mask import EvalPair, TrainPair
from saccade.data.transforms.mask_batch import PairAugment
from saccade.engine.loaders import (
    Loaders,
    Partition,
    Sources,
    UnreadableImages,
    check_path,
    decode_sources,
    memory_loaders,
)
from saccade.engine.module import TrainingModule, TrainingSetup
from saccade.engine.recipe import Data, Recipe
from saccade.engine.report import classes_section, image_figure, image_grid
from saccade.engine.tasks.evaluate_segmenter import (
    MaskEvaluation,
    evaluate_segmenter,
    predict_batch,
    preprocess_images,
)
from saccade.inference.compile import compile_options
from saccade.models.card import Card, preprocess_of
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
CACHE_BYTES = 4 * 2**30  # decoded data sets up to this size are cached on the device
EVAL_BATCH = 8  # images per batch of cached validation data
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
        self.inference = InferenceOptions(window=recipe.data.val_window)
        self.augment = None
        if self.sources.train_memory is not None:
            options = augment_options(recipe, self.preprocess.size, classes)
            self.augment = PairAugment(mean=self.preprocess.mean, std=self.preprocess.std, **options)

    @classmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        seed_all(recipe.seed)
        options, regularize = recipe.model, recipe.regularize
        size = recipe.data.image_size or CROP_SIZE
        kwargs, head_kwargs = dict(options.kwargs), dict(options.head_kwargs)
        if regularize.drop_path:
            kwargs["drop_path_rate"] = regularize.drop_path
        if regularize.dropout:
            head_kwargs["dropout"] = regularize.dropout
        sources = open_mask_sources(recipe.data, size, recipe.seed)
        model = create_segmenter(
            options.name,
            options.head,
            len(sources.classes),
            options.pretrained,
            backbone_kwargs=kwargs,
            head_kwargs=head_kwargs,
            checkpoint=options.checkpoint,
        )
        preprocess = preprocess_of(model.backbone_model)._replace(size=size, crop_pct=1.0)
        card = Card(
            options.name,
            len(sources.classes),
            dict(options.kwargs),
            sources.classes,
            preprocess,
            "segmentation",
            options.head,
            dict(options.head_kwargs),
            recipe.data.val_size,
        )
        return TrainingSetup(model, card, sources, preprocess)

    def compile_model(self, mode: str | None) -> None:
        """Compile backbone and head separately: training calls `loss`, not `forward`."""
        self.model.backbone.compile(**compile_options(mode))
        self.model.head.compile(**compile_options(mode))

    def make_loaders(self, partition: Partition) -> Loaders:
        cached, sources, order = memory_loaders(self.sources, partition), self.sources, partition.order
        if cached is not None:
            return cached
        options = augment_options(self.recipe, self.preprocess.size, sources.classes)
        transform = TrainPair(mean=self.preprocess.mean, **options)
        train = FileLoader(sources.train, transform, order, partition.workers, partition.pin, load_pair)
        return Loaders(order, train, self.val_loader(partition.workers, order.rank, order.world_size, partition.pin))

    def val_loader(self, workers: int | None, rank: int = 0, world: int = 1, pin: bool = False) -> EvalLoader:
        """Return a loader of single images, because their sizes may differ."""
        return EvalLoader(self.sources.val, EvalPair(), 1, workers, rank, world, pin, load_pair)

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

    def reset_metrics(self) -> None:
        self.metric.reset()

    def update_metrics(self, model: nn.Module, batch: Batch) -> None:
        masks = batch.labels.long()
        images = preprocess_images(batch.images, self.preprocess, self.recipe.data.val_size)
        probabilities = predict_batch(model, images, masks.shape[1:], self.inference, self.sources.classes)
        self.metric.update(probabilities.argmax(1), masks)
        self.add_val_loss(pixel_loss(probabilities.clamp(min=1e-9).log(), masks), len(masks))

    def compute_metrics(self) -> dict[str, float]:
        scores = SegmentationScores.from_confusion(self.metric.compute())
        percent = {name: 100 * getattr(scores, name) for name in self.val_metrics if name != "loss"}
        return {"loss": self.mean_val_loss()} | percent

    def evaluate(self, model: nn.Module, device: torch.device) -> MaskEvaluation:
        data, memory, classes = self.recipe.data, self.sources.val_memory, self.sources.classes
        batches: Iterable[Batch] = self.val_loader(data.workers)
        if memory is not None:
            batches = MemoryEvalLoader(memory.to(device), EVAL_BATCH)
        return evaluate_segmenter(
            model, batches, classes, self.preprocess, data.val_size, self.inference, device, self.autocast_dtype
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
            probabilities = predict_batch(model, images, mask.shape, self.inference, self.sources.classes)
            labels = probabilities.argmax(1)[0].byte().cpu().numpy()
            accuracy = f"prediction, {100 * float(evaluation.accuracy[row]):.1f} % correct"
            figures.append(image_figure(image, name, "image", 320))
            for labelled, caption in ((labels, accuracy), (mask, "ground truth")):
                figures.append(
                    image_figure(Image.fromarray(overlay_labels(array, labelled, colours)), name, caption, 320)
                )
        return image_grid(figures, 300)


def legend(classes: list[str]) -> str:
    """Return the colours of the classes as HTML."""
    entries = (
        f'<span style="white-space:nowrap"><span style="color:rgb{tuple(colour)}">■</span> {escape(name)}</span>'
        for name, colour in zip(classes, class_colours(len(classes)).tolist(), strict=True)
    )
    return f'<p class="soft">{" ".join(entries)}</p>'


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


def open_mask_sources(data: Data, image_size: int, seed: int) -> Sources:
    """Open and check images with masks; decode them into memory if they are small and of one size."""
    train, val = open_train_and_val_masks(
        check_path(data, "images and masks in folders, or Parquet, or scenes"),
        data.val_path,
        data.val_fraction,
        seed,
        layout=data.layout,
        classes=data.classes,
        ignore_index=data.ignore_index,
        reduce_zero_label=data.reduce_zero_label,
        image_column=data.image_column,
        mask_column=data.mask_column,
        scenes=data.scenes,
        size=image_size,
    )
    unreadable = UnreadableImages(data.max_unreadable)
    same_size = data.cache is not False and have_one_size(train, val)
    if data.cache is True and not same_size:
        raise DataError("data.cache=true needs images of one size, got several. Set data.cache=false.")
    if not same_size or (data.cache == "auto" and decoded_bytes(train) + decoded_bytes(val) > CACHE_BYTES):
        return Sources(train, val, None, None, unreadable)
    return decode_sources(train, val, EvalPair(), unreadable, data.workers, load_pair)


def have_one_size(*sources: MaskSource) -> bool:
    """Return whether the images of each source have one size, judged by a sample of 32."""
    for source in sources:
        sample = np.unique(np.linspace(0, len(source) - 1, num=min(32, len(source)), dtype=int)).tolist()
        sizes = set()
        for index in sample:
            try:
                sizes.add(source.read(index).size)
            except BadImage:
                continue
        if len(sizes) != 1:
            return False
    return True


def decoded_bytes(source: MaskSource) -> int:
    """Return the size of the decoded images and masks, if all have the size of the first."""
    width, height = source.read(0).size
    return len(source) * 4 * width * height
