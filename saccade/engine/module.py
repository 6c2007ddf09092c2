"""The LightningModule: one optimizer step and one validation. Lightning runs the loop.

`TrainingModule` has what all tasks share; each task is a subclass in `tasks/` with its data, loss and metric.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from saccade.data.loader import seed_all
from saccade.engine.clock import Clock
from saccade.engine.loaders import AnyBatch, BatchStream, Loaders, Partition, Sources
from saccade.engine.recipe import Recipe, RecipeError
from saccade.engine.schedule import make_optimizer, make_schedule
from saccade.inference.compile import compile_options
from saccade.models.card import Card, Preprocess, preprocess_of
from saccade.tasks.classification import freeze_batch_norms
from saccade.tasks.losses import balanced_weights

AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # by trainer.precision


class NonFiniteLoss(RuntimeError):
    """The loss or the weights became infinite or NaN; the message names step, images and the last good checkpoint."""


class TrainingSetup(NamedTuple):
    """Everything a recipe describes, created."""

    model: nn.Module
    card: Card  # metadata for the weights files
    sources: Sources
    preprocess: Preprocess  # of training inputs


def assemble_with_head(
    recipe: Recipe, sources: Sources, create: Callable[..., Any], size: int | None, head_kwargs: dict[str, Any]
) -> TrainingSetup:
    """Return the setup of a backbone with a head; without `size`, images have the detector's own shorter side."""
    options, data, kwargs = recipe.model, recipe.data, dict(recipe.model.kwargs)
    if recipe.regularize.drop_path:
        kwargs["drop_path_rate"] = recipe.regularize.drop_path
    seed_all(recipe.seed)
    model = create(
        options.name,
        options.head,
        len(sources.classes),
        options.pretrained,
        checkpoint=options.checkpoint,
        backbone_kwargs=kwargs,
        head_kwargs=head_kwargs,
    )
    preprocess = preprocess_of(model.backbone_model)._replace(size=size or model.transform.min_size[-1], crop_pct=1.0)
    common = (options.name, len(sources.classes), dict(options.kwargs), sources.classes, preprocess, recipe.task)
    card = Card(*common, options.head, head_kwargs, data.val_size if recipe.task == "segmentation" else None)
    return TrainingSetup(model, card, sources, preprocess)


class WeightAverage(ModelEmaV3):
    """timm's EMA with cached tensor lists: for small models, collecting them costs more than averaging.

    The model must be on its final device before the first step.
    """

    _tensors: tuple[list[Tensor], ...] | None = None

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        if self._tensors is None:
            averages, weights = list(self.module.state_dict().values()), list(model.state_dict().values())
            is_float = [tensor.is_floating_point() for tensor in averages]
            self._tensors = tuple(
                [tensor for tensor, floating in zip(tensors, is_float, strict=True) if floating == wanted]
                for wanted in (True, False)
                for tensors in (averages, weights)
            )
        averages, weights, average_counters, counters = self._tensors
        torch._foreach_lerp_(averages, weights, weight=1 - decay)
        if average_counters:
            torch._foreach_copy_(average_counters, counters)


class TrainingModule(LightningModule):
    """One run of one recipe.

    The random state of a step depends only on (seed, step, micro-batch, rank). A resumed run therefore needs no saved
    random state and ends with the same weights as an uninterrupted one.
    """

    # Names of the metrics; all but the loss are percentages. `monitor` selects the best checkpoint, larger is better.
    monitor: ClassVar[str]
    train_metrics: ClassVar[tuple[str, ...]]
    val_metrics: ClassVar[tuple[str, ...]]

    def __init__(
        self, model: nn.Module, recipe: Recipe, sources: Sources, preprocess: Preprocess, clock: Clock, out: str
    ):
        super().__init__()
        self.model, self.recipe, self.sources, self.preprocess = model, recipe, sources, preprocess
        self.clock, self.out = clock, out
        self.ema: WeightAverage | None = None
        if recipe.ema.decay:
            self.ema = WeightAverage(model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
            self.ema.requires_grad_(False)
        self.micro_batch = 0  # index within the optimizer step
        self.unchecked_losses: list[tuple[int, Tensor, Tensor]] = []  # step, loss, image indices
        self.metric_sum: Tensor | None = None  # of train_metrics, since the last log row
        self.metric_count = 0
        self.val_loss_sum: Tensor  # (2,) summed loss, number of images
        self.last_loss: Tensor | None = None
        self.partition: Partition
        self.loaders: Loaders
        self.stream: BatchStream
        self.rng: torch.Generator
        self.validation: dict[str, float] = {}
        self.validation_pending = False  # due after the last optimizer step and not finished

    # To be defined by each task

    @classmethod
    @abstractmethod
    def assemble(cls, recipe: Recipe) -> TrainingSetup:
        """Create model, card, data and preprocessing; the same seed gives the same weights."""

    @abstractmethod
    def make_loaders(self, partition: Partition) -> Loaders:
        """Return the loaders of one process."""

    @abstractmethod
    def prepare(self, batch: Any) -> tuple[Any, Any]:
        """Return augmented inputs of the model and their targets for a batch of the training loader."""

    @abstractmethod
    def loss_and_metrics(self, images: Any, targets: Any) -> tuple[Tensor, ...]:
        """Return the values of `train_metrics` in order: the loss, then fractions between 0 and 1."""

    @abstractmethod
    def reset_metrics(self) -> None:
        """Reset the validation metrics."""

    @abstractmethod
    def update_metrics(self, model: nn.Module, batch: Any) -> None:
        """Add the predictions for one batch to the validation metrics."""

    @abstractmethod
    def compute_metrics(self) -> dict[str, float]:
        """Return the values of `val_metrics` over all processes."""

    @abstractmethod
    def evaluate(self, model: nn.Module, device: torch.device) -> Any:
        """Evaluate the saved model on the full validation set, on one process; `summary()` goes into result.json."""

    @abstractmethod
    def report_sections(self, model: nn.Module, evaluation: Any) -> list[tuple[str, str]]:
        """Return the task's sections of the report: titles and HTML."""

    def compile_model(self, mode: str | None) -> None:
        self.model.compile(**compile_options(mode))

    # Lightning hooks, in call order

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        fused = self.device.type == "cuda" and recipe.trainer.precision != "16-mixed"
        optimizer = make_optimizer(self.model, recipe.optimizer, recipe.batch_size, fused)
        steps = self.clock.total_steps // recipe.epochs
        self.schedule = make_schedule(optimizer, recipe.schedule, recipe.epochs, steps)
        return optimizer

    def train_dataloader(self) -> Any:
        self.set_up_loaders()
        return self.stream

    def val_dataloader(self) -> Any:
        self.set_up_loaders()
        return self.loaders.val

    def set_up_loaders(self) -> None:
        if hasattr(self, "loaders"):
            return
        trainer, device = self.trainer, self.trainer.strategy.root_device
        world = (trainer.global_rank, trainer.world_size, trainer.num_nodes)
        self.partition = Partition.of(self.recipe, self.sources, device, *world)
        self.loaders = self.make_loaders(self.partition)
        self.stream = BatchStream(self.loaders, self.clock, self.recipe.trainer.val_every)
        self.rng = torch.Generator(device)

    def on_train_start(self) -> None:
        if self.validation_pending:  # the checkpoint was written before or during it; same calls as in Lightning's loop
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_train_epoch_start(self) -> None:
        if self.recipe.regularize.freeze_norm:
            freeze_batch_norms(self.model)
        elif self.recipe.model.freeze:
            freeze_batch_norms(getattr(self.model, "backbone_model", self.model))

    def training_step(self, batch: AnyBatch) -> Tensor:
        if self.micro_batch == 0:
            self.schedule.step_update(self.clock.position)  # type: ignore[arg-type]  # timm also takes fractions
        self.sources.unreadable.add(batch.bad)
        self.seed_step()
        self.set_loss_scale()
        images, targets = self.prepare(batch)
        loss, *metrics = self.loss_and_metrics(images, targets)
        self.log_metrics(batch, loss, *metrics)
        self.micro_batch = (self.micro_batch + 1) % self.recipe.trainer.accumulate
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on the calling thread; autograd's CUDA worker runs on another core with cold caches."""
        with torch.autograd.set_multithreading_enabled(False):
            super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.model.zero_grad()  # before the next forward pass, which can then use the memory of the gradients
        self.clock.tick()
        self.validation_pending = self.trainer.is_last_batch and self.trainer.enable_validation
        if self.clock.limit and self.trainer.world_size > 1:  # learning rates and the end of the run must agree
            self.clock.set_time_state(self.trainer.strategy.broadcast(self.clock.time_state()))
        if self.ema is not None:
            self.ema.update(self.model, step=self.clock.steps)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        if self.recipe.trainer.precision == "16-mixed":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, **kwargs)
        elif gradient_clip_val:  # Lightning refuses to clip with fused optimizers, which is a problem for float16 only
            nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    def on_validation_start(self) -> None:
        self.clock.pause()
        self.val_loss_sum = torch.zeros(2, device=self.device)
        self.reset_metrics()

    def validation_step(self, batch: AnyBatch) -> None:
        self.sources.unreadable.add(batch.bad, "validation")
        if len(batch.labels):
            self.update_metrics(self.eval_model, batch)

    def on_validation_epoch_end(self) -> None:
        self.validation = self.compute_metrics()
        self.validation_pending = False

    def on_train_epoch_end(self) -> None:
        if self.clock.done():
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["saccade"] = self.clock.state_dict() | {"validation_pending": self.validation_pending}
        checkpoint.pop("loops", None)  # the clock has the position in the run; Lightning's counters start at 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.load_state_dict(checkpoint["saccade"])
        self.clock.stopped &= self.recipe.trainer.early_stop is not None
        self.validation_pending = checkpoint["saccade"]["validation_pending"]

    # Parts of a step

    def seed_step(self) -> None:
        """Seed every generator from (seed, step, micro-batch, rank)."""
        key = [self.recipe.seed, 1, self.clock.steps, self.micro_batch, self.trainer.global_rank]
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 2
        seed_all(seed)
        self.rng.manual_seed(seed)

    def set_loss_scale(self) -> None:
        """Pass the float16 loss scale to models that clamp gradients internally (SparseFormer's sampling points)."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and hasattr(self.model, "set_loss_scale"):
            self.model.set_loss_scale(scaler.get_scale())  # type: ignore[operator]

    def log_metrics(self, batch: AnyBatch, *metrics: Tensor) -> None:
        """Accumulate training metrics without synchronising with the device."""
        values = torch.stack([metric.detach().float() for metric in metrics])
        self.last_loss = values[0]
        self.metric_sum = values if self.metric_sum is None else self.metric_sum + values
        self.metric_count += 1
        self.unchecked_losses.append((self.clock.steps, metrics[0].detach(), batch.indices))
        if self.device.type == "cpu" or len(self.unchecked_losses) >= self.recipe.trainer.log_every:
            self.check_losses()

    def check_weights(self) -> None:
        """Raise if a weight is not finite; a step can ruin the weights although its own loss was finite."""
        self.check_losses()
        if not bool(torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()]).all()):
            raise NonFiniteLoss(
                f"the weights are not finite after step {self.clock.steps}. "
                f"{self.out}/last.ckpt is from an earlier step, with finite weights."
            )

    def check_losses(self) -> None:
        """Raise if a loss since the last check is not finite."""
        losses, self.unchecked_losses = self.unchecked_losses, []
        if not losses or bool(torch.isfinite(torch.stack([loss for _, loss, _ in losses])).all()):
            return
        step, loss, indices = next(entry for entry in losses if not torch.isfinite(entry[1]))
        names = [self.sources.train.name(int(index)) for index in indices[:8]]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        raise NonFiniteLoss(
            f"the loss is {float(loss)} at step {step}, on {', '.join(names)}{more}. The last good checkpoint, if one "
            f"was saved, is {self.out}/last.ckpt. Lower optimizer.lr or set optimizer.clip_grad, then use --resume."
        )

    def mean_train_metrics(self) -> dict[str, float] | None:
        """Return the training metrics averaged since the last call, or None if there was no step."""
        total, count = self.metric_sum, self.metric_count
        self.metric_sum, self.metric_count = None, 0
        if total is None:
            return None
        mean = self.trainer.strategy.reduce(total / count, reduce_op="mean")
        assert isinstance(mean, Tensor)
        return {
            name: float(value) * (1 if name == "loss" else 100)
            for name, value in zip(self.train_metrics, mean, strict=True)
        }

    # Shared by the tasks

    def class_weights(self, count: Callable[[], Tensor]) -> Tensor | None:
        """Return regularize.class_weights (K,) on the device of the run; `count` returns the samples per class."""
        given, classes = self.recipe.regularize.class_weights, self.sources.classes
        if given is None:
            return None
        if given == "balanced":
            return balanced_weights(count())
        if len(given) != len(classes):
            raise RecipeError(f"expected {len(classes)} values in regularize.class_weights, got {len(given)}.")
        return torch.tensor(given, dtype=torch.float)

    def add_val_loss(self, loss: Tensor, num_images: int) -> None:
        """Add the mean loss of a validation batch."""
        self.val_loss_sum += torch.stack([loss * num_images, loss.new_tensor(num_images)])

    def mean_val_loss(self) -> float:
        """Return the validation loss over all processes."""
        total = self.trainer.strategy.reduce(self.val_loss_sum, reduce_op="sum")
        assert isinstance(total, Tensor)
        return float(total[0] / total[1])

    @property
    def eval_model(self) -> nn.Module:
        """The model that is validated and saved: the EMA, if there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return AUTOCAST_DTYPES.get(self.recipe.trainer.precision)

    @property
    def epoch(self) -> float:
        """Number of epochs trained."""
        return self.clock.steps * self.recipe.epochs / self.clock.total_steps

    def full_validation(self, device: torch.device) -> Any:
        """Return a loader of the full validation set for this process alone, with all views of a video."""
        alone = Partition.of(self.recipe, self.sources, device)
        return self.make_loaders(alone._replace(images=self.partition.images, views=self.recipe.data.views)).val
