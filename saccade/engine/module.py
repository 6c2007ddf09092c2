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
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from saccade._errors import model_options
from saccade.data.loader import seed_all
from saccade.engine.clock import Clock
from saccade.engine.loaders import AnyBatch, BatchStream, Loaders, Partition, Sources
from saccade.engine.recipe import Recipe, RecipeError
from saccade.engine.schedule import make_optimizer, make_schedule
from saccade.inference.compile import compile_options
from saccade.models.card import Card, Preprocess, preprocess_of
from saccade.reports.page import Thumbnail
from saccade.tasks.classification import freeze_batch_norms
from saccade.tasks.evaluators import Evaluation, Evaluator

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
    built = {"backbone_kwargs": kwargs, "head_kwargs": head_kwargs}
    with torch.device("meta"), model_options(f"{options.name}+{options.head}", kwargs | head_kwargs, "the recipe"):
        create(options.name, options.head, len(sources.classes), **built)
    named = {"checkpoint": options.checkpoint} | built
    model = create(options.name, options.head, len(sources.classes), options.pretrained, **named)
    preprocess = preprocess_of(model.backbone_model)._replace(size=size or model.transform.min_size[-1], crop_pct=1.0)
    common = (options.name, len(sources.classes), dict(options.kwargs), sources.classes, preprocess, recipe.task)
    card = Card(*common, options.head, head_kwargs, data.val_size if recipe.task == "segmentation" else None)
    return TrainingSetup(model, card, sources, preprocess)


class WeightAverage(ModelEmaV3):
    """timm's EMA on cached tensors, which are collected at the first step: local shards if the model is sharded."""

    _tensors: tuple[list[Tensor], list[Tensor]] | None = None

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        if self._tensors is None:
            states = [map(local_tensor, module.state_dict().values()) for module in (self.module, model)]
            pairs = sorted(zip(*states, strict=True), key=lambda pair: pair[0].is_floating_point())
            self._counters = sum(not average.is_floating_point() for average, _ in pairs)  # the first ones
            self._tensors = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        averages, weights = self._tensors
        torch._foreach_lerp_(averages[self._counters :], weights[self._counters :], weight=1 - decay)
        if self._counters:
            torch._foreach_copy_(averages[: self._counters], weights[: self._counters])


def local_tensor(tensor: Any) -> Tensor:
    """Return a tensor, or the part of a DTensor that is on this process, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class TrainingModule(LightningModule):
    """One run of one recipe.

    The random state of a step depends only on (seed, step, micro-batch, rank). A resumed run therefore needs no saved
    random state and ends with the same weights as an uninterrupted one.
    """

    # Names of the metrics; all but the loss are percentages. `monitor` selects the best checkpoint, larger is better.
    monitor: ClassVar[str]
    train_metrics: ClassVar[tuple[str, ...]]
    val_metrics: ClassVar[tuple[str, ...]]
    # Of the report: metric per class, titles of the examples, their number, their width in px
    class_metric: ClassVar[str]
    example_titles: ClassVar[tuple[str, str]] = ("Worst predictions", "Best predictions")
    num_examples: ClassVar[int]
    example_side: ClassVar[int] = 300

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
        self.last_loss: Tensor | None = None
        self.loaders: Any = None  # Loaders; with `partition`, `stream` and `rng` set by `set_up_loaders`
        self.evaluator: Any = None  # an Evaluator, from the first validation on
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
    def make_evaluator(self, sync: bool) -> Evaluator:
        """Return the metrics of the validation set; with `sync`, over all processes."""

    @abstractmethod
    def example(self, model: nn.Module, values: dict[str, Any]) -> list[Thumbnail]:
        """Draw a validation image with its prediction for the report; `values` are those of the evaluator."""

    def balanced_weights(self) -> Tensor:
        """Return class weights (K,) by the frequency of the classes, for tasks with regularize.class_weights."""
        raise NotImplementedError

    def rank_examples(self, images: dict[str, Tensor]) -> tuple[list[int], list[int]]:
        """Return positions of the worst and of the best predictions."""
        order = images["quality"].argsort().tolist()
        return order, order[::-1]

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

    def configure_model(self) -> None:
        """With strategy "fsdp2", shard every block and then the remaining parameters, of the model and of its EMA."""
        if self.device_mesh is None or self.sharded_modules():
            return
        for model in (self.model,) if self.ema is None else (self.model, self.ema.module):
            blocks = [block for name, block in model.named_modules() if name.split(".")[-2:-1] == ["blocks"]]
            for module in (*blocks, model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])
            if hasattr(model, "losses_and_logits"):  # of segmenters, called instead of forward
                register_fsdp_forward_method(model, "losses_and_logits")

    def sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.modules() if isinstance(module, FSDPModule)]

    def train_dataloader(self) -> Any:
        self.set_up_loaders()
        return self.stream

    def val_dataloader(self) -> Any:
        self.set_up_loaders()
        return self.loaders.val

    def set_up_loaders(self) -> None:
        if self.loaders is not None:
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
        self.evaluator = self.evaluator or self.make_evaluator(sync=True)
        self.evaluator.reset(self.device)
        for module in self.sharded_modules():  # processes may have different numbers of validation batches
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def validation_step(self, batch: AnyBatch) -> None:
        self.sources.unreadable.add(batch.bad, "validation")
        if len(batch.labels):
            self.update_metrics(self.eval_model, batch)

    def update_metrics(self, model: nn.Module, batch: AnyBatch) -> None:
        self.evaluator.update(model, batch)

    def compute_metrics(self) -> dict[str, float]:
        """Return the values of `val_metrics` over all processes."""
        metrics = self.evaluator.compute().metrics
        return {name: metrics[name] for name in self.val_metrics if name in metrics}

    def on_validation_epoch_end(self) -> None:
        self.validation = self.compute_metrics()
        self.validation_pending = False
        for module in self.sharded_modules():
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()

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
        if not all(torch.stack([local_tensor(weight).isfinite().all() for weight in self.model.parameters()]).tolist()):
            text = f"the weights are not finite after step {self.clock.steps}."
            raise NonFiniteLoss(f"{text} {self.out}/last.ckpt is from an earlier step, with finite weights.")

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
        mean: Any = self.trainer.strategy.reduce(total / count, reduce_op="mean")
        values = zip(self.train_metrics, mean.tolist(), strict=True)
        return {name: value if name == "loss" else 100 * value for name, value in values}

    # Shared by the tasks

    def class_weights(self) -> Tensor | None:
        """Return regularize.class_weights (K,)."""
        given, classes = self.recipe.regularize.class_weights, self.sources.classes
        if given is None:
            return None
        if given == "balanced":
            return self.balanced_weights()
        if len(given) != len(classes):
            raise RecipeError(f"expected {len(classes)} values in regularize.class_weights, got {len(given)}.")
        return torch.tensor(given, dtype=torch.float)

    @property
    def eval_model(self) -> nn.Module:
        """The model that is validated and saved: the EMA, if there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def epoch(self) -> float:
        """Number of epochs trained."""
        return self.clock.steps * self.recipe.epochs / self.clock.total_steps

    def prepare_on_device(self, batch: AnyBatch) -> None:
        """Do the work of a training step before the model, for measurements."""
        self.prepare(self.transfer_batch_to_device(batch, self.rng.device, 0))

    def evaluate(self, model: nn.Module, device: torch.device) -> Evaluation:
        """Evaluate the saved model on the full validation set, on this process alone, with all views of a video."""
        partition = Partition.of(self.recipe, self.sources, device)
        partition = partition._replace(images=self.partition.images, views=self.recipe.data.views)
        self.evaluator, dtype = self.make_evaluator(sync=False), AUTOCAST_DTYPES.get(self.recipe.trainer.precision)
        return self.evaluator.evaluate(model, self.make_loaders(partition).val, device, dtype)
