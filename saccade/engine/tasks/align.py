"""Training of a bootstrapped SparseFormer: its final token is aligned with that of its source ViT, without labels."""

from typing import Any

import torch
from torch import Tensor

from saccade.data.loader import seed_all
from saccade.engine.loaders import open_sources
from saccade.engine.module import TrainingSetup
from saccade.engine.recipe import Distill, Recipe, RecipeError
from saccade.engine.tasks.classify import ClassificationModule, saved_preprocess, train_preprocess
from saccade.inference.compile import compile_options
from saccade.models.checkpoint import load_checkpoint
from saccade.models.sparseformer_v2 import bootstrap
from saccade.tasks.distillation import Teacher, alignment_loss, final_features, load_teacher_model
from saccade.tasks.evaluators import AlignmentEvaluator
from saccade.tasks.load import card_of


class AlignmentModule(ClassificationModule):
    """A training run of a SparseFormer v2 that starts from the blocks of `distill.teacher`."""

    monitor = "cosine"
    train_metrics = ("loss", "cosine")
    val_metrics = ("loss", "cosine", "agreement")
    features = staticmethod(final_features)

    @classmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        check(recipe)
        distill, kwargs = recipe.distill, dict(recipe.model.kwargs)
        if recipe.regularize.drop_path:
            kwargs["drop_path_rate"] = recipe.regularize.drop_path
        source = load_teacher_model(str(distill.teacher), **distill.kwargs)
        seed_all(recipe.seed)
        try:
            model = bootstrap(source, **kwargs)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"distill.features: {error}") from error
        card: Any = model.card
        preprocess = train_preprocess(card.preprocess, recipe)
        sources = open_sources(recipe, preprocess.size)
        if recipe.model.checkpoint:
            load_checkpoint(model, recipe.model.checkpoint)
        card = card._replace(name=recipe.model.name, preprocess=saved_preprocess(preprocess, recipe, sources))
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
