"""Training of classifiers of images or clips: cross-entropy, optional distillation, accuracy."""

import logging
from pathlib import Path
from typing import Any, ClassVar

import torch
from timm.data.mixup import Mixup
from timm.models import is_model
from torch import Tensor, nn

from saccade._errors import model_options
from saccade.data.decode.video import middle_frame
from saccade.data.loader import Batch, seed_all
from saccade.data.sources.base import count_labels
from saccade.data.synthetic.motions import MotionSet
from saccade.data.transforms.batch import BatchAugment, Policy, normalize, random_erase
from saccade.engine.loaders import Loaders, Partition, Sources, augment_options, image_loaders, open_sources
from saccade.engine.module import TrainingModule, TrainingSetup
from saccade.engine.recipe import Recipe, RecipeError
from saccade.inference.compile import compile_options
from saccade.models.card import Card, Preprocess, preprocess_of
from saccade.reports.page import Thumbnail, image_figure
from saccade.tasks.classification import build_classifier
from saccade.tasks.distillation import Teacher, TeacherEnsemble, distillation_loss, load_teacher
from saccade.tasks.evaluators import ClassEvaluator, Evaluator
from saccade.tasks.losses import balanced_weights, class_loss
from saccade.weights.tags import embedded_tag

_logger = logging.getLogger(__name__)


class ClassificationModule(TrainingModule):
    """A training run of a classifier of images or videos."""

    monitor = "top1"
    train_metrics = ("loss", "top1")
    val_metrics = ("loss", "top1", "top5", "calibration")
    class_metric = "Accuracy"
    example_titles = ("Errors with the highest loss", "Most confident correct predictions")
    num_examples, example_side = 12, 108
    mixup: ClassVar[type[Mixup]] = Mixup

    def __init__(self, *args: Any):
        super().__init__(*args)
        recipe, preprocess = self.recipe, self.preprocess
        num_classes, augment = len(self.sources.classes), recipe.augment
        # A dict, so that Lightning neither saves nor counts its parameters
        self._unregistered = {"teacher": self.load_teacher()}
        self.weight = self.class_weights()
        self.augment = None
        if self.sources.train_memory is not None:
            policy = Policy.parse(augment.auto_augment)
            options = augment_options(augment) | {"jitter": 0.0 if policy else augment.jitter, "policy": policy}
            self.augment = BatchAugment(preprocess.size, preprocess.mean, preprocess.std, **options)
        self.mix = None
        if augment.mixup or augment.cutmix:
            odds = {"prob": augment.mix_prob, "switch_prob": augment.mix_switch, "num_classes": num_classes}
            smoothing = recipe.regularize.label_smoothing
            self.mix = self.mixup(augment.mixup, augment.cutmix, label_smoothing=smoothing, **odds)

    def balanced_weights(self) -> Tensor:
        return balanced_weights(torch.from_numpy(count_labels(self.sources.train)))

    def load_teacher(self) -> Teacher | TeacherEnsemble | None:
        """Return the teacher of the recipe, whose classes are those of the data."""
        distill = self.recipe.distill
        if not distill.teacher:
            return None
        options = (self.preprocess, distill.image_size)
        return load_teacher(distill.teacher, len(self.sources.classes), *options, **distill.kwargs)

    @property
    def teacher(self) -> Teacher | TeacherEnsemble | None:
        return self._unregistered["teacher"]

    @classmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        seed_all(recipe.seed)
        options, regularize = recipe.model, recipe.regularize
        kwargs = dict(options.kwargs)
        for option, value in (("drop_path_rate", regularize.drop_path), ("drop_rate", regularize.dropout)):
            if value:
                kwargs[option] = value
        if options.checkpoint and not Path(options.checkpoint).is_file():
            raise ValueError(f"no such checkpoint: {options.checkpoint}. Correct model.checkpoint.")
        tag = embedded_tag(options.name) if options.pretrained and is_model(options.name) else None
        name = f"{options.name}.{tag}" if tag else options.name  # weights may have an input size of their own
        with torch.device("meta"), model_options(options.name, kwargs, "model.kwargs"):
            default = preprocess_of(build_classifier(name, 2, **kwargs))  # opening the data needs its input size
        data = recipe.data
        preprocess = train_preprocess(default, recipe)
        if recipe.task == "video":
            frames = data.frames or default.frames if default.frames else 1  # image models get the middle frame
            preprocess = preprocess._replace(frames=frames, stride=data.stride)
        elif preprocess.frames:
            raise RecipeError(f"{options.name} takes clips. Train it with task: video (--set task=video).")
        sources = open_sources(recipe, preprocess.size, preprocess.frames)
        if sources.multi_label:
            check_multi_label(recipe)
        seed_all(recipe.seed)
        model = build_classifier(options.name, len(sources.classes), options.checkpoint, options.pretrained, **kwargs)
        saved = saved_preprocess(preprocess, recipe, sources)
        card = Card(options.name, len(sources.classes), dict(options.kwargs), sources.classes, saved)
        card = card._replace(multi_label=sources.multi_label)
        return TrainingSetup(model, card, sources, preprocess)

    def compile_model(self, mode: str | None) -> None:
        super().compile_model(mode)
        if self.teacher is not None:
            self.teacher.compile(**compile_options())
        if self.augment is not None:
            self.augment.apply = torch.compile(self.augment.apply, **compile_options(mode))

    def make_loaders(self, partition: Partition) -> Loaders:
        if self.teacher is not None:
            self.teacher.to(partition.device)
        return image_loaders(self.recipe, self.sources, self.preprocess, partition)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """uint8 images or clips -> augmented, normalised ones (B, 3, S, S), and targets (B,) or (B, K)."""
        augment = self.recipe.augment
        with torch.autocast(self.device.type, enabled=False):
            if self.augment is not None:
                images = self.augment(batch.images, self.rng)
            else:
                images = normalize(batch.images.float() / 255, self.preprocess.mean, self.preprocess.std)
            shape, targets = images.shape, batch.labels
            images = images.flatten(1, -3)  # frames as channels: all frames of a clip are changed alike
            if augment.erase:
                images = random_erase(images, augment.erase, self.rng)
            if self.recipe.trainer.channels_last and len(shape) == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            if self.mix is not None and self.clock.progress < augment.mix_off_after and len(images) % 2 == 0:
                images, targets = self.mix(images, targets)
        return images.view(shape), targets

    def loss_and_metrics(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        return self.loss(logits, targets, images), accuracy

    def loss(self, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        regularize, distill = self.recipe.regularize, self.recipe.distill
        weight = None if self.weight is None else self.weight.to(logits.device)
        loss = class_loss(logits, targets, weight, regularize.focal_gamma, regularize.label_smoothing)
        if self.teacher is None:
            return loss
        distillation = distillation_loss(logits, self.teacher(images), distill.temperature, distill.kind)
        return distill.weight * distillation + (1 - distill.weight) * loss

    def make_evaluator(self, sync: bool) -> Evaluator:
        return ClassEvaluator(len(self.sources.classes), self.val_preprocess, sync=sync)

    @property
    def val_preprocess(self) -> Preprocess:
        return self.preprocess._replace(size=self.recipe.data.val_size or self.preprocess.size)

    def rank_examples(self, images: dict[str, Tensor]) -> tuple[list[int], list[int]]:
        """Return the errors with the highest loss, and the correct predictions with the lowest."""
        order, correct = images["losses"].argsort().tolist(), (images["labels"] == images["predicted"]).tolist()
        return [i for i in reversed(order) if not correct[i]], [i for i in order if correct[i]]

    def example(self, model: nn.Module, values: dict[str, Any]) -> list[Thumbnail]:
        source, index = self.sources.val, values["indices"]
        label, predicted = source.classes[values["labels"]], source.classes[values["predicted"]]
        note = "" if predicted == label else f"true: {label}"
        image = middle_frame(source.read(index))
        return [image_figure(image, source.name(index), f"{predicted} {values['confidence']:.0%}", note)]


def train_preprocess(default: Preprocess, recipe: Recipe) -> Preprocess:
    """Return the model's default preprocessing with the values of the recipe."""
    data = recipe.data
    size, crop_pct = data.image_size or default.size, data.crop_pct or default.crop_pct
    return default._replace(size=size, crop_pct=crop_pct, interpolation=data.interpolation)


def saved_preprocess(preprocess: Preprocess, recipe: Recipe, sources: Sources) -> Preprocess:
    """Return the preprocessing of validation, which the card describes."""
    not_cropped = sources.val_memory is not None or isinstance(sources.val, MotionSet)  # cached images, rendered clips
    size, crop_pct = recipe.data.val_size or preprocess.size, 1.0 if not_cropped else preprocess.crop_pct
    return preprocess._replace(size=size, crop_pct=crop_pct)


def check_multi_label(recipe: Recipe) -> None:
    """Say once that labels are lists; raise for keys that need one label per image."""
    refused = {
        "regularize.label_smoothing": recipe.regularize.label_smoothing,
        "distill.teacher": recipe.distill.teacher,
    }
    if keys := ", ".join(key for key, value in refused.items() if value):
        raise RecipeError(f"{keys}: expected one label per image, got lists of labels. Leave out {keys}.")
    if recipe.data.multi_label is None:
        _logger.warning("the labels are lists: training a multi-label model, with binary cross-entropy and mAP.")
