"""The LightningModule: what happens in one update and in one validation. Lightning turns the crank.

`Training` is the loop that all tasks share; a task is a subclass that gives it data, loss and metric, as `classify` and
`segment` do.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from saccade.data.loader import Batch, seed_all
from saccade.engine.average import Average
from saccade.engine.clock import Clock
from saccade.engine.feed import Feed, Share, Sources
from saccade.engine.optim import make_optimizer, make_schedule
from saccade.engine.recipe import Recipe
from saccade.inference.compiling import compiling
from saccade.models.card import Card, Preprocess
from saccade.tasks.classification import freeze_batch_norms


class NonFiniteLoss(RuntimeError):
    """The loss became infinite or not a number; the message names step, pictures and the last good state."""


class Assembly(NamedTuple):
    """What a recipe stands for, made."""

    model: nn.Module
    card: Card  # what the model's files will say about it
    sources: Sources
    sizes: Preprocess  # of the training input


class Training(LightningModule):
    """One run of one recipe.

    Every die of an update is thrown from (seed, update, part, process), never from what came before. So a run that
    continues from a state needs no memory of its random numbers, and ends as if it had never stopped.
    """

    # A task says which figures it has (all but the loss in %), and which of them, the larger the better, decides.
    score: ClassVar[str]
    trained: ClassVar[tuple[str, ...]]
    validated: ClassVar[tuple[str, ...]]

    def __init__(self, model: nn.Module, recipe: Recipe, sources: Sources, sizes: Preprocess, clock: Clock, out: str):
        super().__init__()
        self.model, self.recipe, self.sources, self.sizes = model, recipe, sources, sizes
        self.clock, self.out = clock, out
        self.ema = None
        if recipe.ema.decay:
            self.ema = Average(model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
            self.ema.requires_grad_(False)
        self.part = 0  # of the batch, when it is taken in parts
        self.recent: list[tuple[int, Tensor, Tensor]] = []  # update, loss, pictures: not yet looked at
        self.sums: dict[str, Any] = {}
        self.feed: Feed
        self.dice: torch.Generator
        self.validation: dict[str, float] = {}
        self.owes_validation = False  # one is due behind the last update, and not over

    # What a task gives

    @classmethod
    @abstractmethod
    def assemble(cls, recipe: Recipe) -> Assembly:
        """Model, card, data and input size; the same seed gives the same weights."""

    @abstractmethod
    def make_feed(self, share: Share) -> Feed:
        """The loaders of one process."""

    @abstractmethod
    def prepare(self, batch: Batch) -> tuple[Tensor, Any]:
        """What lies in the data -> what the model sees in training, and the targets of that."""

    @abstractmethod
    def learn(self, images: Tensor, targets: Any) -> tuple[Tensor, ...]:
        """The loss, and behind it the other figures of `trained`, as shares of 1."""

    @abstractmethod
    def begin_validation(self) -> None:
        """Forget the last one."""

    @abstractmethod
    def validate(self, model: nn.Module, batch: Batch) -> None:
        """Take the answers to one batch into the metric."""

    @abstractmethod
    def finish_validation(self) -> dict[str, float]:
        """The figures of `validated`, over all processes."""

    @abstractmethod
    def evaluate(self, model: nn.Module, device: torch.device) -> Any:
        """The model of the last file on the whole validation set, on one process; its `summary()` is the result."""

    @abstractmethod
    def sections(self, model: nn.Module, evaluation: Any) -> list[tuple[str, str]]:
        """What the report shows of it: titles and HTML."""

    def compile_model(self, mode: str | None) -> None:
        self.model.compile(**compiling(mode))

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
        rank, world = trainer.global_rank, trainer.world_size
        self.feed = self.make_feed(Share.of(self.recipe, self.sources, device, rank, world, here))
        self.dice = torch.Generator(device)

    def on_train_start(self) -> None:
        if self.owes_validation:  # as Lightning does it behind an update
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_train_epoch_start(self) -> None:
        if self.recipe.regularize.freeze_norm:
            freeze_batch_norms(self.model)

    def training_step(self, batch: Batch) -> Tensor:
        if self.part == 0:
            self.schedule.step_update(self.clock.position)  # type: ignore[arg-type]
        self.sources.bad.add(batch.bad)
        self.throw_dice()
        self.tell_loss_scale()
        images, targets = self.prepare(batch)
        loss, *figures = self.learn(images, targets)
        self.watch(batch, loss, *figures)
        self.part = (self.part + 1) % self.recipe.trainer.accumulate
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """By the thread that went forward: for a GPU, autograd takes another one, on whose core nothing is at hand."""
        with torch.autograd.set_multithreading_enabled(False):
            super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.model.zero_grad()  # now, not after the next forward pass: it can have their memory
        self.clock.tick()
        self.owes_validation = self.trainer.is_last_batch and self.trainer.enable_validation
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
        self.begin_validation()

    def validation_step(self, batch: Batch) -> None:
        self.sources.bad.add(batch.bad, "validation")
        if len(batch.labels):
            self.validate(self.kept, batch)

    def on_validation_epoch_end(self) -> None:
        self.validation = self.finish_validation()
        self.owes_validation = False

    def on_train_epoch_end(self) -> None:
        if self.clock.done():
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["saccade"] = self.clock.state_dict() | {"owes_validation": self.owes_validation}
        checkpoint.pop("loops", None)  # the clock knows where the run stands; Lightning starts counting anew

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.load_state_dict(checkpoint["saccade"])
        self.owes_validation = checkpoint["saccade"].get("owes_validation", False)  # older states do not say

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

    def watch(self, batch: Batch, *figures: Tensor) -> None:
        """Remember what the logs need, without making the device wait."""
        fresh = torch.stack([figure.detach().float() for figure in figures])
        self.sums["train"] = self.sums["train"] + fresh if "train" in self.sums else fresh
        self.sums["parts"] = self.sums.get("parts", 0) + 1
        self.recent.append((self.clock.steps, figures[0].detach(), batch.indices))
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
        """Means over the updates since the last call."""
        total, parts = self.sums.pop("train", None), self.sums.pop("parts", 0)
        if total is None:
            return None
        total = self.trainer.strategy.reduce(total / parts, reduce_op="mean")
        assert isinstance(total, Tensor)
        return {
            name: float(value) * (1 if name == "loss" else 100) for name, value in zip(self.trained, total, strict=True)
        }

    @property
    def kept(self) -> nn.Module:
        """The weights that are validated and saved: the average, if there is one."""
        return self.model if self.ema is None else self.ema.module
