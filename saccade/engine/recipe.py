"""A recipe: everything that decides how a run goes, as typed data, in one flat YAML file.

    recipe = load_recipe("recipes/small/svit_nano_cifar10.yaml", ["optimizer.lr=5e-4"])

Classes never see it: the engine takes it apart and hands plain values on.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from saccade._extras import require

# The figures of all tasks, in words; all but the loss are printed in %.
NAMES = {"loss": "loss", "top1": "top-1", "top5": "top-5", "calibration": "calibration error"}
NAMES |= {"miou": "mIoU", "macc": "mean class accuracy", "aacc": "pixel accuracy"}
NAMES |= {"box_ap": "box AP", "box_ap50": "box AP50", "box_ap75": "box AP75"}
NAMES |= {"mask_ap": "mask AP", "mask_ap50": "mask AP50", "mask_ap75": "mask AP75"}


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key and what was expected."""


@dataclass
class Model:
    """Which model, and what it starts from."""

    name: str = "svit_nano"
    kwargs: dict[str, Any] = field(default_factory=dict)  # options of the model
    # on the model as backbone. Segmentation: vt_fpn, fpn, paca, upernet, sparse; detection: mask_rcnn, …, sparse
    head: str = ""
    head_kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None  # weights to start from; a classifier of another size is replaced
    pretrained: bool = False  # weights that come with saccade, or that timm downloads


@dataclass
class Data:
    """Where the pictures are, and how they are read."""

    path: str = ""
    val_path: str | None = None  # else a split of `path`, else `val_fraction` of it
    val_fraction: float = 0.1
    image_size: int | None = None  # side of the training input; None is the model's own
    val_size: int | None = None  # side at validation; None is image_size
    crop_pct: float | None = None  # validation: centre crop / shorter side; None is the model's own
    interpolation: str = "bicubic"
    cache: bool | Literal["auto"] = "auto"  # decode once and augment on the device: for small pictures
    workers: int | None = None  # loader processes; None is one per core but one, at most 16
    max_bad: int = 100  # unreadable pictures until the run stops
    scenes: int = 2048  # of the embedded set "scenes": pictures to train on
    image_column: str | None = None
    label_column: str | None = None
    frames: int | None = None  # of a clip; None is the model's own, and 1 (the middle one) for models of images
    stride: int = 4  # frames of the video from one of the clip to the next
    views: tuple[int, int] = (1, 1)  # of a video at the end: clips in time, crops in space; (4, 3) as in papers
    motions: int = 4096  # of the embedded set "motions": clips of an epoch
    # segmentation
    mask_column: str | None = None
    layout: str = "auto"  # of folders: ade20k, cityscapes, coco_stuff, coco_stuff_things, lip, folders
    classes: list[str] | None = None  # names; None is what the set says
    ignore_index: int | None = None  # value of unlabelled pixels in the files; None is 255, or what the set says
    reduce_zero_label: bool | None = None  # 0 is unlabelled, class k is k + 1; None is what the set is known for
    base_size: int | None = None  # shorter side that augment.resize multiplies; None is each picture's own
    val_window: int = 0  # validation slides a window of this side; 0 looks at the whole picture
    # detection
    max_detections: int = 100  # of a picture and class that the metric looks at; COCO's number


@dataclass
class Optimizer:
    """timm's optimisers by name."""

    name: str = "adamw"
    lr: float = 1e-3
    reference_batch: int | None = None  # if set, the rate is lr * batch_size / reference_batch
    weight_decay: float = 0.05  # none on biases, norms and what the model exempts
    momentum: float = 0.9
    layer_decay: float | None = None
    lr_scale: dict[str, float] = field(default_factory=dict)  # names beginning so learn faster: {head.: 10}
    clip_grad: float | None = None  # largest norm of the gradient
    kwargs: dict[str, Any] = field(default_factory=dict)  # betas, eps, alpha, …


@dataclass
class Schedule:
    """The learning rate over time; epochs may be fractions."""

    name: Literal["cosine", "step", "multistep", "poly", "constant"] = "cosine"
    warmup_epochs: float = 1.0
    warmup_lr: float = 1e-6
    warmup_first: bool = False  # the decay starts after the warm-up instead of under it
    min_lr: float = 1e-5
    decay_epochs: float = 30.0  # "step": every so many epochs …
    decay_rate: float = 0.1  # … times this; "poly": the power
    milestones: list[float] = field(default_factory=list)  # "multistep": epochs after which the rate decays


@dataclass
class Augment:
    """What happens to training pictures."""

    crop: Literal["resized", "pad", "none", "detr"] = "resized"  # "detr" is for detection
    scale: tuple[float, float] = (0.5, 1.0)  # "resized": share of the picture's area
    ratio: tuple[float, float] = (0.75, 1.3333)
    pad: float = 0.125  # "pad": how far the window moves, in widths
    flip: float = 0.5
    jitter: float = 0.0
    auto: str = ""  # "trivial", timm's "rand-m9-mstd0.5-inc1", "original" (AutoAugment), …
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    mix_switch: float = 0.5
    mix_until: float = 1.0  # share of the run with mixup and cutmix on
    repeats: int = 1  # repeated augmentation
    # segmentation and detection, with `flip`
    resize: tuple[float, float] = (0.5, 2.0)  # of the shorter side; detection, "resized": of the longer
    vertical_flip: float = 0.0  # detection
    most: float = 0.75  # share of a crop that one class may fill
    distort: bool = True  # brightness, contrast, saturation, hue


@dataclass
class Regularize:
    label_smoothing: float = 0.0
    drop_path: float = 0.0
    dropout: float = 0.0
    freeze_norm: bool = False  # norm layers with running averages stay in evaluation mode


@dataclass
class Distill:
    """A teacher's logits, or the mean answer of several: weight * distillation + (1 - weight) * cross-entropy."""

    # a timm or saccade model by name (its pretrained weights), or a saccade checkpoint; several separated by commas
    teacher: str | None = None
    weight: float = 0.8
    temperature: float = 1.0
    kind: Literal["soft", "hard"] = "soft"
    image_size: int | None = None  # at which the teacher looks; None is the student's, 0 its own
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ema:
    """A running average of the weights; when on, it is what is validated and kept."""

    decay: float = 0.0  # 0 is off
    warmup: bool = False  # start with a short memory


@dataclass
class Trainer:
    """How the loop runs; device counts and the like go to Lightning as they are."""

    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: str = "auto"
    devices: int | Literal["auto"] = 1
    num_nodes: int = 1
    strategy: str = "auto"
    sync_batchnorm: bool = False
    accumulate: int = 1  # parts of a batch, one after the other
    channels_last: bool = True
    compile: bool = False
    compile_mode: str | None = None
    grad_checkpointing: bool = False
    deterministic: bool = False
    max_minutes: float | None = None  # the schedule is stretched or pressed to end with this time
    val_every: int = 1  # epochs
    save_every: int | None = None  # updates between resumable states; None is every validation and every 10 minutes
    log_every: int = 20  # updates
    loader_seconds: float = 0.0  # after training, measure the loader alone for this long


@dataclass
class Recipe:
    """One run."""

    task: Literal["classification", "segmentation", "detection", "video"] = "classification"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    epochs: int = 10
    batch_size: int = 64  # pictures of one update, over all devices and accumulated parts
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augment = field(default_factory=Augment)
    regularize: Regularize = field(default_factory=Regularize)
    distill: Distill = field(default_factory=Distill)
    ema: Ema = field(default_factory=Ema)
    trainer: Trainer = field(default_factory=Trainer)
    seed: int = 0

    def __post_init__(self):
        _expect(self.epochs >= 1, f"epochs must be at least 1, got {self.epochs}")
        _expect(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        _expect(0 <= self.distill.weight <= 1, f"distill.weight lies between 0 and 1, got {self.distill.weight}")
        _expect(0 <= self.ema.decay < 1, f"ema.decay lies between 0 and 1, got {self.ema.decay}")
        _expect(self.trainer.accumulate >= 1, "trainer.accumulate must be at least 1")
        sharded = self.trainer.strategy.startswith(("fsdp", "deepspeed", "model_parallel"))
        _expect(not (sharded and self.ema.decay), "an average of the weights (ema.decay) needs whole weights: use ddp")
        _expect(self.task != "segmentation" or self.model.head, "segmentation needs model.head: vt_fpn, fpn, paca, …")
        _expect(self.task != "detection" or self.model.head, "detection needs model.head: mask_rcnn, sparse, …")
        mixes = self.augment.mixup > 0 or self.augment.cutmix > 0
        _expect(not (mixes and self.batch_size % 2), "mixup and cutmix pair pictures: batch_size must be even")


def load_recipe(source: str | Path | Mapping[str, Any] | None, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file (or a dict, or nothing), with `key=value` changes; both checked against the types."""
    yaml = require("yaml", "train")
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            found = _read_yaml(path.read_text())
        except OSError as error:
            raise RecipeError(f"no recipe at {path} ({error.strerror}).") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(found, dict):
            raise RecipeError(f"{path} is no recipe: expected keys and values, got {type(found).__name__}.")
    else:
        path, found = None, dict(source or {})
    values = _merged(found, [_change(text) for text in changes])
    _check_keys(values, Recipe, "")
    return _typed(values, str(path or "recipe"))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain values, ready for YAML or JSON."""
    return {key: _plain(value) for key, value in dataclasses.asdict(recipe).items()}


def to_yaml(recipe: Recipe) -> str:
    return require("yaml", "train").safe_dump(to_dict(recipe), sort_keys=False)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise RecipeError(f"{message}.")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _read_yaml(text: str) -> Any:
    """YAML in which 1e-3 is a number: PyYAML by itself wants 1.0e-3 and takes the rest for words."""
    yaml = require("yaml", "train")
    loader = type("Loader", (yaml.SafeLoader,), {})
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader=loader)


def _change(text: str) -> tuple[list[str], Any]:
    """ "optimizer.lr=5e-4" -> (["optimizer", "lr"], "5e-4"), the value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {text!r}: expected key=value, such as optimizer.lr=5e-4.")
    return key.split("."), _read_yaml(value)


def _merged(values: Mapping[str, Any], changes: list[tuple[list[str], Any]]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for path, value in changes:
        place = result
        for key in path[:-1]:
            inner = place.get(key)
            place[key] = dict(inner) if isinstance(inner, Mapping) else {}
            place = place[key]
        place[path[-1]] = value
    return result


def _check_keys(values: Mapping[str, Any], kind: type, prefix: str) -> None:
    """An unknown key is an error that names the nearest known one, wherever in the recipe that lies."""
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known:
            close = get_close_matches(key, known, n=1) or get_close_matches(key, list(_all_keys(Recipe)), n=1)
            close = [f"{prefix}{name}" for name in close if name in known] or close
            close = close or [name for name in _all_keys(Recipe) if name.rpartition(".")[2] == key]
            hint = f" Did you mean {close[0]}?" if close else f" Known here: {', '.join(known)}."
            raise RecipeError(f"unknown key {prefix}{key}.{hint}")
        inner = known[key].type
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{prefix}{key} is a group of settings, got {value!r}. Set {prefix}{key}.KEY=VALUE.")
            _check_keys(value, inner, f"{prefix}{key}.")


def _all_keys(kind: type, prefix: str = "") -> Iterator[str]:
    for entry in dataclasses.fields(kind):
        if dataclasses.is_dataclass(entry.type) and isinstance(entry.type, type):
            yield from _all_keys(entry.type, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


def _typed(values: dict[str, Any], where: str) -> Recipe:
    """Types checked and converted by jsonargparse."""
    jsonargparse = require("jsonargparse", "train")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Recipe, "recipe")
    try:
        parsed = parser.parse_object({"recipe": values})
        return parser.instantiate_classes(parsed).recipe
    except (jsonargparse.ArgumentError, TypeError) as error:
        words = " ".join(str(error).replace("recipe.", "").split())
        raise RecipeError(f"{where}: {words}") from error
