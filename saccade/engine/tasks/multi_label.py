"""Training of multi-label classifiers of images or clips: binary cross-entropy, mean average precision."""

from typing import Any

import torch
from torch import Tensor, nn

from saccade.data.decode.video import middle_frame
from saccade.data.sources.base import count_labels
from saccade.data.transforms.batch import MultiHotMixup
from saccade.engine.module import TrainingModule
from saccade.engine.tasks.classify import ClassificationModule
from saccade.reports.page import Thumbnail, image_figure
from saccade.tasks.evaluators import Evaluator, LabelEvaluator
from saccade.tasks.losses import label_loss, positive_weights

THRESHOLD = 0.5  # of the predicted labels in the report


class MultiLabelModule(ClassificationModule):
    """A training run of a classifier with any number of classes per image."""

    monitor = "map"
    train_metrics = ("loss",)
    val_metrics = ("loss", "map", "f1")
    class_metric = "Average precision"
    example_titles = ("Images with the highest loss", "Images with the lowest loss")
    mixup = MultiHotMixup
    rank_examples = TrainingModule.rank_examples

    def balanced_weights(self) -> Tensor:
        train = self.sources.train
        return positive_weights(torch.from_numpy(count_labels(train)), len(train))

    def loss_and_metrics(self, images: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (label_loss(self.model(images), targets, self.weight, self.recipe.regularize.focal_gamma).mean(),)

    def make_evaluator(self, sync: bool) -> Evaluator:
        return LabelEvaluator(len(self.sources.classes), self.val_preprocess, sync=sync)

    def example(self, model: nn.Module, values: dict[str, Any]) -> list[Thumbnail]:
        source, index = self.sources.val, values["indices"]
        scores = zip(source.classes, values["scores"], strict=True)
        predicted = [f"{name} {score:.0%}" for name, score in scores if score >= THRESHOLD]
        labels = [name for name, label in zip(source.classes, source.labels[index], strict=True) if label]
        caption, note = ", ".join(predicted) or "no label", f"true: {', '.join(labels) or 'no label'}"
        return [image_figure(middle_frame(source.read(index)), source.name(index), caption, note)]
