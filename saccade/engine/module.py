"""The LightningModule: what happens in one update and in one validation. Lightning turns the crank."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from timm.data.mixup import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from saccade.data.augment import erase, normalise, resize
from saccade.data.loader import Batch, seed_all
from saccade.engine.clock import Clock
from saccade.engine.feed import Feed, Sources, batch_augment
from saccade.engine.optim import make_optimizer, make_schedule
from saccade.engine.recipe import Recipe
from saccade.models._card import Preprocess
from saccade.tasks.classification import accuracy_metrics, classification_loss, freeze_norms
from saccade.tasks.distillation import Teacher, distillation_loss


class NonFiniteLoss(RuntimeError):
    """The loss became infinite or not a number; the message names step, pictures and the last good state."""


class Training(LightningModule):
    """One run of one recipe.

    Every die of an update is thrown from (seed, update, part, process), never from what came before. So a run that
    continues from a state needs no memory of its random numbers, and ends as if it had never stopped.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, sources: Sources, sizes: Preprocess, clock: Clock, out: str,
        teacher: Teacher | None = None,
    ):  # fmt: skip
        super().__init__()
        self.model, self.recipe, self.sources, self.sizes = model, recipe, sources, sizes
        self.clock, self.out = clock, out
        self.ema = None
        if recipe.ema.decay:
            self.ema = ModelEmaV3(model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
            self.ema.requires_grad_(False)
        self.hidden = {"teacher": teacher}  # in a dict: neither saved nor counted as part of the model
        num_classes = len(sources.classes)
        self.metrics = accuracy_metrics(num_classes)
        augment = recipe.augment
        self.augment = batch_augment(augment, sizes.size, sizes) if sources.train_memory is not None else None
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
        self.part = 0  # of the batch, when it is taken in parts
        self.recent: list[tuple[int, Tensor, Tensor]] = []  # update, loss, pictures: not yet looked at
        self.sums: dict[str, Any] = {}
        self.feed: Feed
        self.dice: torch.Generator
        self.validation: dict[str, float] = {}

    # Lightning's hooks, in the order in which they are called

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        fused = self.device.type == "cuda" and recipe.trainer.precision != "16-mixed"
        optimizer = make_optimizer(self.model, recipe.optimizer, recipe.batch_size, fused)
        steps = self.clock.total // recipe.epochs
        self.schedule = make_schedule(optimizer, recipe.schedule, recipe.epochs, steps)
        return optimizer

    def train_dataloader(self) -> Any:
        self.set_up_feed()
        return self.feed.stream(self.clock, self.recipe.trainer.val_every)

    def val_dataloader(self) -> Any:
        self.set_up_feed()
        return self.feed.val

    def set_up_feed(self) -> None:
        if hasattr(self, "feed"):
            return
        trainer = self.trainer
        device = trainer.strategy.root_device
        here = max(1, trainer.world_size // trainer.num_nodes)
        self.feed = Feed(self.recipe, self.sources, self.sizes, device, trainer.global_rank, trainer.world_size, here)
        self.dice = torch.Generator(device)
        if self.hidden["teacher"] is not None:
            self.hidden["teacher"].to(device)

    def on_train_epoch_start(self) -> None:
        if self.recipe.regularize.freeze_norm:
            freeze_norms(self.model)

    def training_step(self, batch: Batch) -> Tensor:
        if self.part == 0:
            self.schedule.step_update(self.clock.position)  # type: ignore[arg-type]
        self.sources.bad.add(batch.bad)
        self.throw_dice()
        self.tell_loss_scale()
        images, targets = self.prepare(batch)
        logits = self.model(images)
        loss = self.loss(logits, targets, images)
        self.watch(loss, logits, targets, batch)
        self.part = (self.part + 1) % self.recipe.trainer.accumulate
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.clock.tick()
        if self.clock.limit and self.trainer.world_size > 1:  # one watch for all: rates and the end must agree
            self.clock.agree(self.trainer.strategy.broadcast(self.clock.opinion()))
        if self.ema is not None:
            self.ema.update(self.model, step=self.clock.steps)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        if self.recipe.trainer.precision == "16-mixed":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, **kwargs)
        elif gradient_clip_val:  # Lightning refuses to clip for fused optimisers, which matters for scaled losses only
            nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    def on_validation_start(self) -> None:
        self.clock.pause()
        self.metrics.reset()
        self.sums["val"] = torch.zeros(2, device=self.device)  # summed loss, pictures

    def validation_step(self, batch: Batch) -> None:
        self.sources.bad.add(batch.bad, "validation")
        if not len(batch.labels):
            return
        images = self.straight(batch.images)
        model = self.model if self.ema is None else self.ema.module
        logits = model(images).float()
        self.metrics.update(logits, batch.labels)
        loss = classification_loss(logits, batch.labels)
        self.sums["val"] += torch.stack([loss * len(batch.labels), loss.new_tensor(len(batch.labels))])

    def on_validation_epoch_end(self) -> None:
        found = self.metrics.compute()
        total = self.trainer.strategy.reduce(self.sums["val"], reduce_op="sum")
        assert isinstance(total, Tensor)
        self.validation = {
            "loss": float(total[0] / total[1]),
            "top1": 100 * float(found["top1"]),
            "top5": 100 * float(found["top5"]),
            "calibration": 100 * float(found["calibration"]),
        }

    def on_train_epoch_end(self) -> None:
        if self.clock.done():
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["saccade"] = self.clock.state_dict()
        checkpoint.pop("loops", None)  # the clock knows where the run stands; Lightning starts counting anew

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.load_state_dict(checkpoint["saccade"])

    # The parts of an update

    def throw_dice(self) -> None:
        place = [self.recipe.seed, 1, self.clock.steps, self.part, self.trainer.global_rank]
        seed = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0]) >> 2
        seed_all(seed)
        self.dice.manual_seed(seed)

    def tell_loss_scale(self) -> None:
        """float16 scales its loss; a model that bounds gradients inside must know by how much (SF-12)."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and hasattr(self.model, "set_loss_scale"):
            self.model.set_loss_scale(scaler.get_scale())  # type: ignore[operator]

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """uint8 pictures -> augmented, normalised pictures (B, 3, S, S), or clips, and targets (B,) or (B, K)."""
        augment = self.recipe.augment
        with torch.autocast(self.device.type, enabled=False):
            if self.augment is not None:
                images = self.augment(batch.images, self.dice)
            else:
                images = normalise(batch.images.float() / 255, self.sizes.mean, self.sizes.std)
            shape, targets = images.shape, batch.labels
            images = images.flatten(1, -3)  # frames of a clip as channels: what happens to one happens to all
            if augment.erase:
                images = erase(images, augment.erase, self.dice)
            if self.recipe.trainer.channels_last and len(shape) == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            if self.mix is not None and self.clock.share < augment.mix_until and len(images) % 2 == 0:
                images, targets = self.mix(images, targets)
        return images.view(shape), targets

    def straight(self, images: Tensor) -> Tensor:
        """uint8 pictures -> normalised pictures, as validation sees them."""
        size = self.recipe.data.val_size or self.sizes.size
        with torch.autocast(self.device.type, enabled=False):
            return normalise(resize(images.float() / 255, size).clamp(0, 1), self.sizes.mean, self.sizes.std)

    def loss(self, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        loss = classification_loss(logits, targets, self.recipe.regularize.label_smoothing)
        teacher, distill = self.hidden["teacher"], self.recipe.distill
        if teacher is None:
            return loss
        taught = distillation_loss(logits, teacher(images), distill.temperature, distill.kind)
        return distill.weight * taught + (1 - distill.weight) * loss

    def watch(self, loss: Tensor, logits: Tensor, targets: Tensor, batch: Batch) -> None:
        """Remember what the logs need, without making the device wait."""
        with torch.no_grad():
            labels = targets if targets.ndim == 1 else targets.argmax(1)
            hits = (logits.argmax(1) == labels).float().mean()
            fresh = torch.stack([loss.detach().float(), hits])
            self.sums["train"] = self.sums["train"] + fresh if "train" in self.sums else fresh
            self.sums["parts"] = self.sums.get("parts", 0) + 1
        self.recent.append((self.clock.steps, loss.detach(), batch.indices))
        if self.device.type == "cpu" or len(self.recent) >= self.recipe.trainer.log_every:
            self.check_finite()

    def check_weights(self) -> None:
        """Before they are saved: a step can ruin them although its own loss was finite."""
        self.check_finite()
        if not bool(torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()]).all()):
            raise NonFiniteLoss(
                f"the weights are no longer finite after update {self.clock.steps}; "
                f"the state in {self.out}/last.ckpt is older and good."
            )

    def check_finite(self) -> None:
        """Look at the losses not yet looked at."""
        recent, self.recent = self.recent, []
        if not recent or bool(torch.isfinite(torch.stack([loss for _, loss, _ in recent])).all()):
            return
        step, loss, indices = next(entry for entry in recent if not torch.isfinite(entry[1]))
        names = [self.sources.train.name(int(index)) for index in indices[:8]]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        state = f"{self.out}/last.ckpt"
        raise NonFiniteLoss(
            f"the loss is {float(loss)} at update {step}. Its pictures: {', '.join(names)}{more}. "
            f"The last good state, if one was saved, is {state}: lower optimizer.lr or set optimizer.clip_grad, "
            "then continue with --resume."
        )

    def train_averages(self) -> dict[str, float] | None:
        """Mean loss and accuracy of the updates since the last call."""
        total, parts = self.sums.pop("train", None), self.sums.pop("parts", 0)
        if total is None:
            return None
        total = self.trainer.strategy.reduce(total / parts, reduce_op="mean")
        return {"loss": float(total[0]), "top1": 100 * float(total[1])}

    @property
    def kept(self) -> nn.Module:
        """The weights that are validated and saved: the average, if there is one."""
        return self.model if self.ema is None else self.ema.module
