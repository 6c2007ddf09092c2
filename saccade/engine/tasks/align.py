"""Training of a bootstrapped SparseFormer: its final token is aligned with that of its source ViT, without labels."""

from typing import Any

import torch
from torch import Tensor, nn

from saccade._extras import require
from saccade.data.loader import Batch, seed_all
from saccade.engine.loaders import open_sources
from saccade.engine.module import TrainingSetup
from saccade.engine.recipe import Distill, Recipe, RecipeError
from saccade.engine.tasks.classify import ClassificationModule
from saccade.inference.compile import compile_options
from saccade.models.card import Preprocess
from saccade.models.checkpoint import load_checkpoint
from saccade.models.sparseformer_v2 import bootstrap
from saccade.tasks.distillation import Teacher, alignment_loss, final_features, load_teacher_model
from saccade.tasks.evaluators import Evaluation, Evaluator
from saccade.tasks.load import card_of
from saccade.tasks.predict import normalize_pixels


class AlignmentEvaluator(Evaluator):
    """Mean cosine similarity with the teacher's final token, and images with its most probable class."""

    columns = ("indices",)

    def __init__(self, teacher: Teacher, preprocess: Preprocess, sync: bool = False):
        super().__init__(sync, agreement=require("torchmetrics", "train").MeanMetric(sync_on_compute=sync))
        self.teacher, self.preprocess = teacher, preprocess

    def update(self, model: nn.Module, batch: Batch) -> None:
        images = normalize_pixels(batch.images.to(self.metrics["loss"].device), self.preprocess)
        ours, theirs = final_features(model, images), self.teacher.features(images)
        owners: Any = ((model, ours), (self.teacher.model, theirs))
        classes = [owner.get_classifier()(tokens).argmax(1) for owner, tokens in owners]
        self.metrics["loss"].update(alignment_loss(ours, theirs), len(images))
        self.metrics["agreement"].update((classes[0] == classes[1]).float())
        self.images.append({"indices": batch.indices})

    def compute(self) -> Evaluation:
        loss, agreement = self.mean_loss(), float(self.metrics["agreement"].compute())
        metrics = {"loss": loss, "cosine": 100 * (1 - loss), "agreement": 100 * agreement}
        return Evaluation(metrics, [], None, self.image_values())


class AlignmentModule(ClassificationModule):
    """A training run of a SparseFormer v2 that starts from the blocks of `distill.teacher`."""

    monitor = "cosine"
    train_metrics = ("loss", "cosine")
    val_metrics = ("loss", "cosine", "agreement")
    features = staticmethod(final_features)

    @classmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        check(recipe)
        data, distill, kwargs = recipe.data, recipe.distill, dict(recipe.model.kwargs)
        if recipe.regularize.drop_path:
            kwargs["drop_path_rate"] = recipe.regularize.drop_path
        source = load_teacher_model(str(distill.teacher), **distill.kwargs)
        seed_all(recipe.seed)
        try:
            model = bootstrap(source, **kwargs)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"distill.features: {error}") from error
        card: Any = model.card
        preprocess = card.preprocess._replace(
            size=data.image_size or card.preprocess.size,
            crop_pct=data.crop_pct or card.preprocess.crop_pct,
            interpolation=data.interpolation,
        )
        sources = open_sources(recipe, preprocess.size)
        if recipe.model.checkpoint:
            load_checkpoint(model, recipe.model.checkpoint)
        val_preprocess = preprocess._replace(size=data.val_size or preprocess.size)
        if sources.val_memory is not None:
            val_preprocess = val_preprocess._replace(crop_pct=1.0)  # cached images are not cropped
        card = card._replace(name=recipe.model.name, preprocess=val_preprocess)
        model.card = card  # type: ignore[assignment] # nn.Module declares tensors and modules only
        return TrainingSetup(model, card, sources, preprocess)

    def load_teacher(self) -> Teacher:
        distill = self.recipe.distill
        source = load_teacher_model(str(distill.teacher), **distill.kwargs)
        size = None if distill.image_size is None else distill.image_size or card_of(source).preprocess.size
        return Teacher(source, None, self.preprocess, size)

    def compile_model(self, mode: str | None) -> None:
        self.features = torch.compile(final_features, **compile_options(mode))
        if self.augment is not None:
            self.augment.apply = torch.compile(self.augment.apply, **compile_options(mode))

    def loss_and_metrics(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.teacher, Teacher)
        loss = alignment_loss(self.features(self.model, images), self.teacher.features(images))
        return loss, 1 - loss.detach()

    def make_evaluator(self, sync: bool) -> AlignmentEvaluator:
        assert isinstance(self.teacher, Teacher)
        return AlignmentEvaluator(self.teacher, self.val_preprocess, sync)


def check(recipe: Recipe) -> None:
    """Raise for keys that an alignment cannot honour: there are no labels, and the weights come from the teacher."""
    model, distill, regularize = recipe.model, recipe.distill, recipe.regularize
    if recipe.task != "classification" or not model.name.startswith("sparseformer_btsp_"):
        raise RecipeError(
            f"distill.features: expected task classification and model.name sparseformer_btsp_…, got {recipe.task} and "
            f"{model.name}."
        )
    if not distill.teacher or "," in distill.teacher:
        raise RecipeError(f"distill.features: expected one ViT as distill.teacher, got {distill.teacher!r}.")
    refused = {
        "model.pretrained": model.pretrained,
        "model.freeze": model.freeze,
        "regularize.class_weights": regularize.class_weights,
        "regularize.focal_gamma": regularize.focal_gamma,
        "regularize.label_smoothing": regularize.label_smoothing,
        "distill.weight": distill.weight != Distill.weight,
        "distill.temperature": distill.temperature != Distill.temperature,
        "distill.kind": distill.kind != Distill.kind,
    }
    if keys := [key for key, value in refused.items() if value]:
        raise RecipeError(f"distill.features has no labels and no logits: leave out {', '.join(keys)}.")
