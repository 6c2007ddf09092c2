"""Classification in the loop: pictures or clips and class numbers, cross-entropy, perhaps a teacher, accuracy."""

from pathlib import Path
from typing import Any

import torch
from timm.data.mixup import Mixup
from torch import Tensor, nn

from saccade.data.loader import Batch, MemoryEvalLoader, seed_all
from saccade.data.synthetic.motions import MotionSet
from saccade.data.transforms.batch import normalize, random_erase, resize
from saccade.engine.evaluate import Evaluation, evaluate_model
from saccade.engine.feed import Feed, Share, batch_augment, evaluation_batches, open_sources, picture_feed
from saccade.engine.module import Assembly, Training
from saccade.engine.recipe import Recipe, RecipeError
from saccade.engine.report import classes_section, pictures_section
from saccade.inference.compiling import compiling
from saccade.models.card import Card, preprocess_of
from saccade.tasks.classification import accuracy_metrics, build_classifier, classification_loss
from saccade.tasks.distillation import distillation_loss, load_teacher


class Classify(Training):
    """One run of one recipe for classification, of pictures or of videos."""

    score = "top1"
    trained = ("loss", "top1")
    validated = ("loss", "top1", "top5", "calibration")

    def __init__(self, *args: Any):
        super().__init__(*args)
        recipe, sizes = self.recipe, self.sizes
        num_classes, augment, distill = len(self.sources.classes), recipe.augment, recipe.distill
        teacher = None
        if distill.teacher:
            teacher = load_teacher(distill.teacher, num_classes, sizes, distill.image_size, **distill.kwargs)
        self.hidden = {"teacher": teacher}  # in a dict: neither saved nor counted as part of the model
        self.metrics = accuracy_metrics(num_classes)
        self.augment = batch_augment(augment, sizes.size, sizes) if self.sources.train_memory is not None else None
        self.mix = None
        if augment.mixup or augment.cutmix:
            self.mix = Mixup(
                augment.mixup,
                augment.cutmix,
                prob=augment.mix_prob,
                switch_prob=augment.mix_switch,
                label_smoothing=recipe.regularize.label_smoothing,
                num_classes=num_classes,
            )

    @classmethod
    def assemble(cls, recipe: Recipe) -> Assembly:
        seed_all(recipe.seed)
        wanted, regularize = recipe.model, recipe.regularize
        kwargs = dict(wanted.kwargs)
        for option, value in (("drop_path_rate", regularize.drop_path), ("drop_rate", regularize.dropout)):
            if value:
                kwargs[option] = value
        if wanted.checkpoint and not Path(wanted.checkpoint).is_file():
            raise RecipeError(f"model.checkpoint: no such checkpoint: {wanted.checkpoint}")
        try:
            with torch.device("meta"):  # only its description is needed to open the data
                described = preprocess_of(build_classifier(wanted.name, 2, **kwargs))
        except TypeError as error:
            raise RecipeError(f"{wanted.name} cannot be built with {kwargs}: {error}") from error
        data = recipe.data
        sizes = described._replace(
            size=data.image_size or described.size,
            crop_pct=data.crop_pct or described.crop_pct,
            interpolation=data.interpolation,
        )
        if recipe.task == "video":
            frames = data.frames or described.frames if described.frames else 1  # models of images see the middle one
            sizes = sizes._replace(frames=frames, stride=data.stride)
        elif sizes.frames:
            raise RecipeError(f"{wanted.name} takes clips: train it with task: video (--set task=video).")
        sources = open_sources(data, sizes.size, recipe.seed, sizes.frames)
        seed_all(recipe.seed)
        model = build_classifier(wanted.name, len(sources.classes), wanted.checkpoint, wanted.pretrained, **kwargs)
        seen = sizes._replace(size=data.val_size or sizes.size)
        if sources.val_memory is not None or isinstance(sources.val, MotionSet):
            seen = seen._replace(crop_pct=1.0)  # pictures in memory and rendered clips are used whole
        card = Card(wanted.name, len(sources.classes), dict(wanted.kwargs), sources.classes, seen)
        return Assembly(model, card, sources, sizes)

    def compile_model(self, mode: str | None) -> None:
        super().compile_model(mode)
        if self.hidden["teacher"] is not None:
            self.hidden["teacher"].compile(**compiling())
        if self.augment is not None:
            self.augment.apply = torch.compile(self.augment.apply, **compiling(mode))

    def make_feed(self, share: Share) -> Feed:
        if self.hidden["teacher"] is not None:
            self.hidden["teacher"].to(share.device)
        return picture_feed(self.recipe, self.sources, self.sizes, share)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """uint8 pictures -> augmented, normalised pictures (B, 3, S, S), or clips, and targets (B,) or (B, K)."""
        augment = self.recipe.augment
        with torch.autocast(self.device.type, enabled=False):
            if self.augment is not None:
                images = self.augment(batch.images, self.dice)
            else:
                images = normalize(batch.images.float() / 255, self.sizes.mean, self.sizes.std)
            shape, targets = images.shape, batch.labels
            images = images.flatten(1, -3)  # frames of a clip as channels: what happens to one happens to all
            if augment.erase:
                images = random_erase(images, augment.erase, self.dice)
            if self.recipe.trainer.channels_last and len(shape) == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            if self.mix is not None and self.clock.share < augment.mix_until and len(images) % 2 == 0:
                images, targets = self.mix(images, targets)
        return images.view(shape), targets

    def learn(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        hits = (logits.detach().argmax(1) == labels).float().mean()
        return self.loss(logits, targets, images), hits

    def loss(self, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        loss = classification_loss(logits, targets, self.recipe.regularize.label_smoothing)
        teacher, distill = self.hidden["teacher"], self.recipe.distill
        if teacher is None:
            return loss
        taught = distillation_loss(logits, teacher(images), distill.temperature, distill.kind)
        return distill.weight * taught + (1 - distill.weight) * loss

    def straight(self, images: Tensor) -> Tensor:
        """uint8 pictures -> normalised pictures, as validation sees them."""
        size = self.recipe.data.val_size or self.sizes.size
        with torch.autocast(self.device.type, enabled=False):
            return normalize(resize(images.float() / 255, size).clamp(0, 1), self.sizes.mean, self.sizes.std)

    def begin_validation(self) -> None:
        self.metrics.reset()
        self.sums["val"] = torch.zeros(2, device=self.device)  # summed loss, pictures

    def validate(self, model: nn.Module, batch: Batch) -> None:
        logits = model(self.straight(batch.images)).float()
        self.metrics.update(logits, batch.labels)
        loss = classification_loss(logits, batch.labels)
        self.sums["val"] += torch.stack([loss * len(batch.labels), loss.new_tensor(len(batch.labels))])

    def finish_validation(self) -> dict[str, float]:
        found = self.metrics.compute()
        total = self.trainer.strategy.reduce(self.sums["val"], reduce_op="sum")
        assert isinstance(total, Tensor)
        shares = {name: 100 * float(found[name]) for name in self.validated if name != "loss"}
        return {"loss": float(total[0] / total[1])} | shares

    def evaluate(self, model: nn.Module, device: torch.device) -> Evaluation:
        recipe, sources = self.recipe, self.sources
        sizes = self.sizes._replace(size=recipe.data.val_size or self.sizes.size)
        share = self.feed.order.batch_size // self.feed.order.accumulate // self.feed.order.world_size
        if sources.val_memory is not None:
            batches: Any = MemoryEvalLoader(sources.val_memory.to(device), share)
        else:
            batches = evaluation_batches(sources.val, sizes, share, recipe.data.workers, device, recipe.data.views)
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(recipe.trainer.precision)
        return evaluate_model(model, batches, len(sources.classes), sizes, device, dtype)

    def sections(self, model: nn.Module, evaluation: Evaluation) -> list[tuple[str, str]]:
        source = self.sources.val
        return [
            ("Classes", classes_section(evaluation.per_class, evaluation.confusion, source.classes, "Accuracy")),
            ("Pictures it is most wrong about", pictures_section(evaluation, source, worst=True)),
            ("Pictures it is most sure of, rightly", pictures_section(evaluation, source, worst=False)),
        ]
