"""The card in the metadata of a weights file: model and options, classes, preprocessing.

`save_model` writes it into safetensors metadata; `saccade.load` builds the model from the file alone.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from timm.data import ImageNetInfo
from timm.models import is_model
from torch import Tensor, nn

from saccade.models.checkpoint import identify, save_checkpoint
from saccade.models.registry import MEAN, STD
from saccade.weights.read import CheckpointError, read_metadata, read_state_dict

MAX_SIZE = 2**16  # pixels of an image's side
# Arguments of timm.create_model that read files or download them; a card must not have them.
SOURCE_OPTIONS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "file"}


class Preprocess(NamedTuple):
    """How images are prepared for a model."""

    size: int = 224
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    crop_pct: float = 1.0  # centre crop / resized shorter side
    interpolation: str = "bicubic"
    frames: int = 0  # per clip; 0 for image models
    stride: int = 1  # between the frames of a clip


class Card(NamedTuple):
    """Everything needed to build a model from its file and to interpret its outputs."""

    name: str
    num_classes: int
    kwargs: dict[str, Any]  # options of the model
    classes: list[str]  # class names in order; empty if unknown
    preprocess: Preprocess
    task: str = "classification"
    head: str = ""  # on the backbone `name`, for tasks with several heads
    head_kwargs: dict[str, Any] = {}  # noqa: RUF012
    shorter: int | None = None  # side to which images are resized in dense tasks; None keeps their size
    multi_label: bool = False  # several classes per image: a sigmoid per class instead of a softmax over the classes

    def __repr__(self) -> str:
        model = f"{self.name}+{self.head}" if self.head else self.name
        kind = "labels" if self.multi_label else "classes"
        frames = f", {self.preprocess.frames} frames" if self.preprocess.frames else ""
        return f"Card({model}: {self.task}, {self.num_classes} {kind}, {self.preprocess.size} px{frames})"

    def metadata(self) -> dict[str, str]:
        """The card as metadata of a safetensors file; `read_card` reads it."""
        fields = {"model": self.name} | self._asdict() | {"preprocess": self.preprocess._asdict()}
        del fields["name"]
        return {
            f"saccade.{key}": value if isinstance(value, str) else json.dumps(value)
            for key, value in fields.items()
            if value or key not in Card._field_defaults
        }

    @property
    def names(self) -> list[str]:
        """Readable class names; ImageNet's for 1000 unnamed classes, else class numbers where names are unknown."""
        if not self.classes and self.task == "classification" and self.num_classes == 1000:
            info = ImageNetInfo()
            return [info.index_to_description(i).partition(",")[0] for i in range(1000)]
        return [readable(name) for name in self.classes] or [str(number) for number in range(self.num_classes)]


def readable(name: str) -> str:
    """A class name without its WordNet id: "n01443537 goldfish" becomes "goldfish"."""
    return re.sub(r"^n\d{8}[ _]+(?=\S)", "", name)


def preprocess_of(model: nn.Module) -> Preprocess:
    """Preprocessing from timm's configuration of a model."""
    return _preprocess(getattr(model, "pretrained_cfg", None) or {})


def timm_config(card: Card, video: bool = False) -> dict[str, Any]:
    """The fields of timm's `pretrained_cfg` that a card states; image models read single frames of a video."""
    preprocess, size = card.preprocess, card.preprocess.size
    return {
        "input_size": (3, preprocess.frames, size, size) if video else (3, size, size),
        "pool_size": (max(1, size // 32),) * 2,
        "mean": preprocess.mean,
        "std": preprocess.std,
        "crop_pct": preprocess.crop_pct,
        "interpolation": preprocess.interpolation,
        "num_classes": card.num_classes,
        "label_names": tuple(card.names),
    }


def _preprocess(config: Any) -> Preprocess:
    shape = config.get("input_size", (3, 224, 224))
    return Preprocess(
        shape[-1],
        tuple(config.get("mean", MEAN)),
        tuple(config.get("std", STD)),
        config.get("crop_pct") or 1.0,
        config.get("interpolation") or "bicubic",
        shape[1] if len(shape) == 4 else 0,
    )


def save_model(
    model: nn.Module,
    path: str | os.PathLike,
    card: Card,
    state_dict: Mapping[str, Tensor] | None = None,
    **notes: str,
) -> None:
    """Write weights and card into one safetensors file, atomically; `notes` are further metadata."""
    notes = {f"saccade.{key}": value for key, value in notes.items()}
    save_checkpoint(model, path, card.metadata() | notes, state_dict)


def read_card(path: str | os.PathLike) -> Card:
    """The card in a file's metadata; without metadata, from the names and shapes of its tensors."""
    try:
        metadata = read_metadata(path) if Path(path).suffix == ".safetensors" and Path(path).is_file() else {}
    except SafetensorError:  # damaged: reading its tensors raises a clear error
        metadata = {}
    try:
        if "saccade.model" in metadata:
            return _checked(_metadata_card(metadata))
        if (card := _timm_card(Path(path).parent / "config.json")) is not None:
            return _checked(card)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"the card of {path} is damaged ({reason}). Download or save it again.") from error
    name, classes = identify(read_state_dict(path))
    return Card(name, classes, {}, [], Preprocess())


def _metadata_card(metadata: Mapping[str, str]) -> Card:
    fields: dict[str, Any] = {"num_classes": 1000, "kwargs": {}, "classes": [], "preprocess": {}}
    for name in Card._fields:
        if (text := metadata.get(f"saccade.{name}")) is not None:
            fields[name] = text if name in ("task", "head") else json.loads(text)
    preprocess = Preprocess(**fields["preprocess"])
    preprocess = preprocess._replace(mean=tuple(preprocess.mean), std=tuple(preprocess.std))
    return Card(**(fields | {"name": metadata["saccade.model"], "preprocess": preprocess}))


def _timm_card(path: Path) -> Card | None:
    """The card of a repository that timm wrote, from its config.json; None if it is not timm's."""
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(config, dict) or not is_model(str(config.get("architecture", ""))):
        return None
    names, options = config.get("label_names") or [], config.get("model_args") or {}
    if isinstance(options, dict):
        options = {key: value for key, value in options.items() if key != "num_classes"}  # timm 1.0.31 writes it
    return Card(
        config["architecture"],
        config["num_classes"],
        options,
        list(names.values()) if isinstance(names, dict) else list(names),
        _preprocess(config.get("pretrained_cfg") or {}),
    )


def _checked(card: Card) -> Card:
    """The card itself, or ValueError for values that no model has, or that would read other files."""
    preprocess, normalization = card.preprocess, (*card.preprocess.mean, *card.preprocess.std)
    valid = {
        "model": isinstance(card.name, str) and not set(card.name) & set(":/\\"),  # no other source
        "num_classes": _is_count(card.num_classes, 0, 10**7),
        "kwargs": _are_options(card.kwargs) and _are_options(card.head_kwargs),
        "classes": isinstance(card.classes, list) and all(isinstance(name, str) for name in card.classes),
        "size": _is_count(preprocess.size, 1, MAX_SIZE)
        and (card.shorter is None or _is_count(card.shorter, 1, MAX_SIZE)),
        "mean and std": all(isinstance(value, (int, float)) and math.isfinite(value) for value in normalization),
        "crop_pct": isinstance(preprocess.crop_pct, (int, float)) and 0 < preprocess.crop_pct <= 10,
        "interpolation": isinstance(preprocess.interpolation, str),
        "frames": _is_count(preprocess.frames, 0, 10**4) and _is_count(preprocess.stride, 1, 10**6),
        "task": isinstance(card.task, str) and isinstance(card.head, str),
    }
    if invalid := [key for key, is_valid in valid.items() if not is_valid]:
        raise ValueError(f"invalid {', '.join(invalid)}")
    return card


def _is_count(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _are_options(options: Any) -> bool:
    """Keyword arguments that change the model, not where its weights come from."""
    return isinstance(options, dict) and not any(key in SOURCE_OPTIONS for key in options)
