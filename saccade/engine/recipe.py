"""Recipes: the complete configuration of a training run as typed dataclasses, read from one flat YAML file.

    recipe = load_recipe("recipes/small/svit_nano_cifar10.yaml", ["optimizer.lr=5e-4"])

Models, heads and loaders never receive a recipe: the engine passes them plain values.
"""

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from saccade._errors import UsageError
from saccade._extras import require

HEADS = {"segmentation": "vt_fpn, fpn, paca, upernet, sparse", "detection": "mask_rcnn, cascade_mask_rcnn, sparse"}

LOSS_TASKS = {"dice": ("segmentation",), "label_smoothing": ("classification", "video")}
LOSS_TASKS |= dict.fromkeys(("class_weights", "focal_gamma"), ("classification", "video", "segmentation"))

IN_WORDS = {
    bool: ("true", "false"),
    int: ("an integer",),
    float: ("a number",),
    str: ("text",),
    dict: ("keys with values",),
    NoneType: ("null",),
}

RANGES = (  # lowest value, highest value, both in words, keys; all numbers must also be finite
    (1, math.inf, "a number of at least 1", """epochs batch_size data.limit data.image_size data.val_size data.scenes
     data.motions data.frames data.stride data.views data.base_size data.max_detections optimizer.reference_batch
     augment.repeats trainer.devices trainer.num_nodes trainer.accumulate trainer.val_every trainer.early_stop
     trainer.save_every trainer.log_every"""),
    (0, math.inf, "a number of at least 0", """data.max_unreadable data.workers data.val_window optimizer.lr
     optimizer.weight_decay optimizer.momentum optimizer.lr_scale optimizer.clip_grad schedule.warmup_epochs
     schedule.warmup_lr schedule.min_lr schedule.decay_rate schedule.milestones augment.pad augment.jitter
     augment.mixup augment.cutmix regularize.class_weights regularize.focal_gamma regularize.dice distill.image_size
     trainer.max_minutes trainer.loader_benchmark_seconds"""),
    (0, 2**63 - 1, "a number from 0 to 2^63 - 1", "seed"),
    (math.ulp(0.0), math.inf, "a number above 0", """data.crop_pct schedule.decay_epochs augment.scale augment.ratio
     augment.resize distill.temperature"""),
    (0, 1, "a number between 0 and 1", """data.val_fraction optimizer.layer_decay augment.flip augment.vertical_flip
     augment.erase augment.mix_prob augment.mix_switch augment.mix_off_after augment.max_class_fraction
     distill.weight"""),
    (0, math.nextafter(1, 0), "a number of at least 0 and below 1", """ema.decay regularize.label_smoothing
     regularize.drop_path regularize.dropout"""),
)  # fmt: skip


class RecipeError(UsageError):
    """An invalid recipe; the message names the key and the expected value."""


@dataclass
class Model:
    """Model, head and initial weights."""

    name: str = "svit_nano"  # a saccade or timm model
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the model
    # Segmentation: vt_fpn, fpn, paca, upernet, sparse; detection: mask_rcnn, cascade_mask_rcnn, sparse
    head: str = ""
    head_kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the head
    checkpoint: str | None = None  # initial weights; a classifier of another size is replaced
    pretrained: bool = False  # embedded weights, or timm's download
    freeze: bool = False  # train the classifier or head only


@dataclass
class Data:
    """Location of the data and how it is read."""

    path: str = ""  # see data.md
    val_path: str | None = None  # default: a split of `path`, or else `val_fraction` of it
    val_fraction: float = 0.1  # held out for validation, of each class
    limit: int | None = None  # at most this many training and validation images each, of all classes: for a quick try
    image_size: int | None = None  # side of training inputs; None: the model's default
    val_size: int | None = None  # side of validation inputs; None: image_size
    crop_pct: float | None = None  # validation: centre crop / shorter side; None: the model's default
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos"] = "bicubic"  # of resized images
    cache: bool | Literal["auto"] = "auto"  # decode once and augment on the device; auto: if all images are small
    cache_folder: str | None = None  # decoded images are stored here once, for all runs on the same data
    workers: int | None = None  # loader processes; None: cores - 1, at most 16
    max_unreadable: int = 100  # abort when more images than this cannot be read
    scenes: int = 2048  # number of training images of the embedded set "scenes"
    image_column: str | None = None  # of Parquet files; None: found by its type
    label_column: str | None = None  # of Parquet files; None: found by its name
    multi_label: bool | None = None  # any number of classes per image; None: if the labels are lists, see data.md
    frames: int | None = None  # per clip; None: the model's default, or 1 (the middle frame) for image models
    stride: int = 4  # video frames between consecutive frames of a clip
    views: tuple[int, int] = (1, 1)  # final evaluation of a video: temporal clips, spatial crops; papers use (4, 3)
    motions: int = 4096  # clips per epoch of the embedded set "motions"
    # Segmentation
    mask_column: str | None = None  # of Parquet files; None: found by its name
    layout: str = "auto"  # of folders: ade20k, cityscapes, coco_stuff, coco_stuff_things, coco_stuff_merged, lip, …
    classes: list[str] | None = None  # names; None: read from the data
    ignore_index: int | None = None  # value of unlabelled pixels in the files; None: 255, or the layout's value
    reduce_zero_label: bool | None = None  # 0 means unlabelled and k + 1 class k; None: as the layout defines it
    mask_values: list[int] | list[str] | None = None  # file value or colour ("#ff0000") of every class, in order
    base_size: int | None = None  # shorter side that augment.resize multiplies; None: each image's own
    val_window: int = 0  # side of the sliding window at validation; 0: the full image
    # Detection
    max_detections: int = 100  # per image and class in the metric; COCO's value


@dataclass
class Optimizer:
    """A timm optimizer by name."""

    name: str = "adamw"  # one of timm.optim.list_optimizers()
    lr: float = 1e-3  # peak learning rate
    reference_batch: int | None = None  # if set, the learning rate is lr * batch_size / reference_batch
    weight_decay: float = 0.05  # not applied to biases, norms and parameters that the model exempts
    momentum: float = 0.9  # of SGD and RMSProp
    layer_decay: float | None = None  # factor of the learning rate per layer, from the head down
    lr_scale: dict[str, float] = field(default_factory=dict)  # factor by parameter-name prefix: {head.: 10}
    clip_grad: float | None = None  # maximum gradient norm
    kwargs: dict[str, Any] = field(default_factory=dict)  # betas, eps, alpha, …


@dataclass
class Schedule:
    """Learning rate over time, in epochs (fractions allowed)."""

    name: Literal["cosine", "step", "multistep", "poly", "constant"] = "cosine"  # decay
    warmup_epochs: float = 1.0  # linear increase from warmup_lr
    warmup_lr: float = 1e-6  # of the first step
    decay_after_warmup: bool = False  # start the decay at the end of warm-up instead of at epoch 0
    min_lr: float = 1e-5  # at the end of "cosine" and "poly"
    decay_epochs: float = 30.0  # "step": interval between decays
    decay_rate: float = 0.1  # "step", "multistep": factor of each decay; "poly": power
    milestones: list[float] = field(default_factory=list)  # "multistep": epochs of the decays


@dataclass
class Augment:
    """Augmentation of training images."""

    crop: Literal["resized", "pad", "none", "detr"] = "resized"  # "detr": detection only
    scale: tuple[float, float] = (0.5, 1.0)  # "resized": fraction of the image area
    ratio: tuple[float, float] = (0.75, 1.3333)  # "resized": width / height
    pad: float = 0.125  # "pad": padding as a fraction of the image side
    flip: float = 0.5  # probability of a horizontal flip
    jitter: float = 0.0  # colour jitter; ignored while auto_augment is set
    auto_augment: str = ""  # "trivial", timm's "rand-m9-mstd0.5-inc1", "original" (AutoAugment), …
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # alpha; 0: off
    cutmix: float = 0.0  # alpha; 0: off
    mix_prob: float = 1.0  # probability of mixing a batch
    mix_switch: float = 0.5  # probability of cutmix when both are on
    mix_off_after: float = 1.0  # fraction of the run after which mixup and cutmix are off
    custom: str = ""  # "package.function", called first: image -> image; with masks or objects, both -> both
    repeats: int = 1  # repeated augmentation: copies of an image per batch
    # Segmentation and detection, together with `flip`
    resize: tuple[float, float] = (0.5, 2.0)  # scale of the shorter side; detection with "resized": of the longer side
    vertical_flip: float = 0.0  # detection
    max_class_fraction: float = 0.75  # segmentation: redraw crops in which one class covers more than this
    distort: bool = True  # random brightness, contrast, saturation and hue


@dataclass
class Regularize:
    """Loss and regularisation."""

    class_weights: list[float] | Literal["balanced"] | None = None  # in the loss; balanced: inverse class frequency
    focal_gamma: float = 0.0  # focal loss; 0: cross-entropy
    dice: float = 0.0  # segmentation: weight of the Dice loss, added to the pixel loss
    label_smoothing: float = 0.0  # classification with one label per image
    drop_path: float = 0.0  # stochastic depth
    dropout: float = 0.0  # before the classifier, or in the segmentation head
    freeze_norm: bool = False  # batch norms stay in evaluation mode


@dataclass
class Distill:
    """Distillation: loss = weight * distillation + (1 - weight) * cross-entropy; with `features`, see there."""

    # timm or saccade model names (with pretrained weights), saccade checkpoints, or "package.module:function" that
    # returns any module, separated by commas; several teachers are averaged
    teacher: str | None = None
    weight: float = 0.8  # of the distillation loss
    temperature: float = 1.0  # of "soft"
    kind: Literal["soft", "hard"] = "soft"  # the teacher's probabilities, or its most probable class
    # Turn the teacher, a timm ViT, into the SparseFormer v2 `model.name` (saccade.bootstrap with `model.kwargs`) and
    # train its final token to have the direction of the teacher's. Labels are not read
    features: bool = False
    image_size: int | None = None  # teacher input; None: the student's, 0: the teacher's default
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the teacher


@dataclass
class Ema:
    """Exponential moving average of the weights; when on, the average is validated and saved."""

    decay: float = 0.0  # 0: off
    warmup: bool = False  # smaller decay at the start of the run


@dataclass
class Trainer:
    """Options of the training loop; accelerator, devices, num_nodes and strategy are passed to Lightning unchanged."""

    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"  # Lightning's names
    accelerator: str = "auto"  # cpu, gpu, …
    devices: int | Literal["auto"] = 1  # processes per machine
    num_nodes: int = 1  # machines
    strategy: str = "auto"  # ddp; fsdp2: weights, gradients and optimizer state sharded per block; or another one
    sync_batchnorm: bool = False  # over all GPUs
    accumulate: int = 1  # micro-batches per optimizer step
    channels_last: bool = True  # memory format of model and images
    compile: bool = False  # torch.compile
    compile_mode: str | None = None  # of torch.compile
    grad_checkpointing: bool = False  # recompute activations in backward
    deterministic: bool = False  # deterministic algorithms only
    max_minutes: float | None = None  # stop after this time; the schedule is stretched or compressed to fit
    val_every: int = 1  # epochs
    early_stop: int | None = None  # stop after this many validations without a better one
    save_every: int | None = None  # optimizer steps between checkpoints; None: every validation and every 10 minutes
    log_every: int = 20  # optimizer steps
    logger: Literal["auto", "tensorboard", "wandb", "mlflow", "csv"] = "auto"  # besides metrics.csv; auto: TensorBoard
    loader_benchmark_seconds: float = 0.0  # after training, measure the data loader alone for this long


@dataclass
class Recipe:
    """One training run."""

    task: Literal["classification", "segmentation", "detection", "video"] = "classification"  # what is trained
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    epochs: int = 10  # passes over the training data
    batch_size: int = 64  # images per optimizer step, over all devices and micro-batches
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augment = field(default_factory=Augment)
    regularize: Regularize = field(default_factory=Regularize)
    distill: Distill = field(default_factory=Distill)
    ema: Ema = field(default_factory=Ema)
    trainer: Trainer = field(default_factory=Trainer)
    seed: int = 0  # of initial weights, data order and augmentation

    def __post_init__(self):
        _check_ranges(self)
        strategy = self.trainer.strategy
        if strategy == "fsdp2":
            _check(self.trainer.devices != "auto", "trainer.strategy=fsdp2 needs a number in trainer.devices, got auto")
            _check(self.trainer.precision != "16-mixed", "fsdp2 supports 32-true and bf16-mixed, got 16-mixed")
        elif strategy.startswith(("fsdp", "deepspeed", "model_parallel")):
            _check(not self.ema.decay, f"ema.decay needs ddp or fsdp2, got trainer.strategy={strategy}")
        if self.task in HEADS:
            _check(bool(self.model.head), f"{self.task} needs model.head: {HEADS[self.task]}")
        if self.data.multi_label and (self.task in HEADS or self.distill.features):
            kind = "distill.features" if self.distill.features else f"task {self.task}"
            _check(False, f"data.multi_label is for classification and video, got {kind}. Leave it out")
        for key, tasks in LOSS_TASKS.items():
            _check(
                not getattr(self.regularize, key) or self.task in tasks,
                f"regularize.{key} is for {' and '.join(tasks)}, got task {self.task}. Leave it out",
            )
        odd = self.batch_size % 2 and (self.augment.mixup > 0 or self.augment.cutmix > 0)
        _check(not odd, f"mixup and cutmix pair images: batch_size must be even, got {self.batch_size}")


def load_recipe(source: str | Path | Mapping[str, Any] | None, changes: Sequence[str | tuple[str, Any]] = ()) -> Recipe:
    """Return a type-checked recipe from a YAML file, a dict or the defaults.

    Changes are applied in order: "optimizer.lr=5e-4", or a key and its value.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            values = _read_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RecipeError(f"no recipe at {path} ({error.strerror}).") from error
        except Exception as error:  # PyYAML raises ValueError, AttributeError, RecursionError, ... for odd scalars
            raise RecipeError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise RecipeError(f"{path} is not a recipe: expected keys and values, got {type(values).__name__}.")
    else:
        path, values = None, dict(source or {})
    values = _merge(values, [_parse_change(change) for change in changes])
    _refuse_classes(values)
    _check_keys(values, Recipe, "")
    return _instantiate(values, str(path or "recipe"))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values for YAML or JSON."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))  # tuples as lists


def to_yaml(recipe: Recipe) -> str:
    return require("yaml", "train").safe_dump(to_dict(recipe), sort_keys=False)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RecipeError(f"{message}.")


def _check_ranges(recipe: Recipe) -> None:
    """Raise for a number that is not finite, or outside the range of its key."""
    for key in _all_keys(Recipe):
        value = attrgetter(key)(recipe)
        if any(isinstance(number, float) and not math.isfinite(number) for number in _numbers_within(value)):
            raise RecipeError(_wrong_value(key, value, "finite numbers"))
    for lowest, highest, expected, keys in RANGES:
        for key in keys.split():
            value = attrgetter(key)(recipe)
            if not all(lowest <= number <= highest for number in _numbers_within(value)):
                raise RecipeError(_wrong_value(key, value, expected))


def _numbers_within(value: Any) -> Iterator[float]:
    """The numbers in a value, also in lists and dicts."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_within(inner)


def _read_yaml(text: str) -> Any:
    """Parse YAML with 1e-3 as a number; PyYAML alone accepts only 1.0e-3 and returns a string otherwise."""
    yaml = require("yaml", "train")

    def compose_node(loader: Any, parent: Any, index: Any) -> Any:
        if loader.check_event(yaml.AliasEvent):  # nested aliases grow exponentially
            raise yaml.YAMLError("expected values, got an alias. Write the value out")
        return yaml.SafeLoader.compose_node(loader, parent, index)

    loader: Any = type("Loader", (yaml.SafeLoader,), {"compose_node": compose_node})
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader=loader)


def _parse_change(change: str | tuple[str, Any]) -> tuple[list[str], Any]:
    """ "optimizer.lr=5e-4" -> (["optimizer", "lr"], 5e-4); the value is parsed as YAML."""
    if not isinstance(change, str):
        return change[0].split("."), change[1]
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {change!r}: expected key=value, such as optimizer.lr=5e-4.")
    try:
        return key.split("."), _read_yaml(value)
    except Exception as error:  # as in load_recipe
        raise RecipeError(f"--set {change!r}: not valid YAML: {' '.join(str(error).split())}") from error


def _merge(values: Mapping[str, Any], changes: list[tuple[list[str], Any]]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for path, value in changes:
        group = result
        for key in path[:-1]:
            inner = group.get(key)
            group[key] = dict(inner) if isinstance(inner, Mapping) else {}
            group = group[key]
        group[path[-1]] = value
    return result


def _check_keys(values: Mapping[str, Any], kind: type, prefix: str) -> None:
    """Raise for an unknown key, naming the closest key anywhere in the recipe."""
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key, value in values.items():
        if not isinstance(key, str):
            raise RecipeError(f"expected names as keys of a recipe, got {prefix}{key!r}.")
        if key not in fields:
            close = get_close_matches(key, fields, n=1) or get_close_matches(key, list(_all_keys(Recipe)), n=1)
            close = [f"{prefix}{name}" for name in close if name in fields] or close
            close = close or [name for name in _all_keys(Recipe) if name.rpartition(".")[2] == key]
            hint = f" Did you mean {close[0]}?" if close else f" Known keys: {', '.join(fields)}."
            raise RecipeError(f"unknown key {prefix}{key}.{hint}")
        inner = fields[key].type
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{prefix}{key} is a group of keys, got {value!r}. Set {prefix}{key}.KEY=VALUE.")
            _check_keys(value, inner, f"{prefix}{key}.")
        elif value is None and inner is not str and NoneType not in get_args(inner):
            # jsonargparse would accept it. "augment.custom=", YAML's null, removes a text.
            raise RecipeError(_wrong_value(f"{prefix}{key}", value))


def _refuse_classes(value: Any) -> None:
    """jsonargparse would build any installed class that a value names as class_path, also inside a YAML string."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_classes(key)
            _refuse_classes(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_classes(inner)
    elif isinstance(value, str) and value in ("class_path", "init_args"):
        raise RecipeError(f"expected plain values in a recipe, got {value}. Use augment.custom for your own code.")
    elif isinstance(value, str) and ":" in value:
        try:
            inner = _read_yaml(value)
        except Exception:  # then jsonargparse reads it as text, too
            return
        if not isinstance(inner, str):
            _refuse_classes(inner)


def _all_keys(kind: type, prefix: str = "") -> Iterator[str]:
    for entry in dataclasses.fields(kind):
        if dataclasses.is_dataclass(entry.type) and isinstance(entry.type, type):
            yield from _all_keys(entry.type, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


@lru_cache(maxsize=1)
def _parser() -> Any:
    """jsonargparse's parser of `Recipe`; building it takes longer than using it."""
    parser = require("jsonargparse", "train").ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Recipe, "recipe")
    return parser


def _instantiate(values: dict[str, Any], name: str) -> Recipe:
    """Check and convert types with jsonargparse."""
    jsonargparse, parser = require("jsonargparse", "train"), _parser()
    try:
        parsed = parser.parse_object({"recipe": values})
        _refuse_classes(parsed.as_dict())  # before they are built
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # before jsonargparse 4.49
        return instantiate(parsed).recipe
    except RecipeError:
        raise
    except OverflowError as error:
        raise RecipeError(f"{name}: expected numbers below 1e308, got a larger one. Lower it.") from error
    except (jsonargparse.ArgumentError, TypeError, ValueError, RecursionError) as error:
        message = " ".join(str(error).replace("recipe.", "").split())
        match = re.match(r'Parser key "([\w.]+)"', message)
        if match and match[1] in _all_keys(Recipe):
            value: Any = values
            for key in match[1].split("."):
                value = value[key]
            message = _wrong_value(match[1], value)
        raise RecipeError(f"{name}: {message}") from error


def _wrong_value(key: str, value: Any, expected: str = "") -> str:
    """The message for a value that the type of its key does not allow, or that is not what is expected."""
    kind: Any = Recipe
    for name in key.split("."):
        (entry,) = (entry for entry in dataclasses.fields(kind) if entry.name == name)
        kind = entry.type
    default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    *first, last = dict.fromkeys(_in_words(kind))
    expected = expected or (f"{', '.join(first)} or {last}" if first else last)
    hint = f"Leave it out for the default, {json.dumps(default)}."
    return f"expected {expected} for {key}, got {reprlib.repr(value)}. {hint}"


def _in_words(kind: Any) -> Iterator[str]:
    """What a recipe may write for a type: "an integer", "null", …"""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in IN_WORDS or origin is dict:
        yield from IN_WORDS[origin or kind]
    elif origin is Literal:
        yield from arguments
    elif origin in (list, tuple):
        count = f"{len(arguments)} " if origin is tuple else ""
        yield f"a list of {count}{' '.join(_in_words(arguments[0])).removeprefix('an ').removeprefix('a ')}s"
    else:
        for argument in arguments:
            yield from _in_words(argument)
