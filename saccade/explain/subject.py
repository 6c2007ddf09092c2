"""The model to be explained: by name, from a checkpoint, or as it is; with all that is known about its input."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models import get_pretrained_cfg
from torch import nn

from saccade.explain.hooks.record import reporters
from saccade.models.card import Card, Preprocess, weights_file
from saccade.models.checkpoint import load_checkpoint, read_state_dict
from saccade.models.registry import MEAN, STD, create_model, embedded_tag, list_models
from saccade.tasks.detection import DETECTORS
from saccade.tasks.open import open_task_model, read_task_card

SIZE = 224  # for models that do not say
CHECKPOINTS = (".safetensors", ".pth", ".pt", ".bin")


class Subject(NamedTuple):
    model: nn.Module
    name: str
    weights: str  # where they are from, in words
    trained: bool
    labels: Sequence[str] | None  # class names
    size: int  # side of the square it was made for
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int = 0  # of a clip; 0 where pictures are expected
    stride: int = 1  # of a clip: frames of the video from one to the next
    detector: nn.Module | None = None  # that `model` is the backbone of

    def label(self, number: int) -> str:
        return self.labels[number] if self.labels and number < len(self.labels) else f"class {number}"


def load_subject(
    model: nn.Module | str | os.PathLike,
    labels: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Subject:
    """`model` is a module, a name of the registry, or a checkpoint (saccade's or the authors').

    A name gets its pretrained weights if there are any, else fresh ones from `seed`. `options` are keywords of the
    model, for ablations. Of a detector, its backbone is shown, for that is where the tokens are, and what it finds.
    """
    options = dict(options or {})
    weights, trained, card = "as given", True, None
    if isinstance(model, nn.Module):
        name = config_of(model).get("architecture") or type(model).__name__
    elif is_checkpoint(Path(model)):
        weights = Path(model).name
        model, card = _from_file(Path(model), options)
        name = card.name
    else:
        name = str(model)
        model, weights, trained = _by_name(name, seed, options)
    detector = model if isinstance(model, DETECTORS) else None
    if device is not None:
        model = model.to(device)
    model = model if detector is None else detector.trunk
    reporters(model)  # its error says what can be explained
    expects = card.preprocess if card else preprocess_of(model)
    mean, std, channels = expects.mean, expects.std, getattr(model, "in_chans", 3)
    if channels == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    elif channels != 3:
        raise ValueError(f"{name} takes {channels} channels; pictures have 3 (or 1 with in_chans=1).")
    labels = labels or (card.names if card and card.classes else None) or class_names(model)
    clip = expects.frames, expects.stride
    return Subject(model, name, weights, trained, labels, expects.size, mean, std, *clip, detector)


def is_checkpoint(path: Path) -> bool:
    """A file, or a training run's folder; a path that looks like a file is meant to be one."""
    if path.is_dir():
        return any((path / name).is_file() for name in ("best.safetensors", "last.safetensors"))
    return path.is_file() or path.suffix in CHECKPOINTS


def preprocess_of(model: nn.Module) -> Preprocess:
    """What the model, or the backbone inside it, says it expects."""
    config = config_of(model)
    shape = config.get("input_size") or (3, SIZE, SIZE)
    clip = {"frames": shape[1], "stride": 4} if len(shape) == 4 else {}
    return Preprocess(shape[-1], tuple(config.get("mean") or MEAN), tuple(config.get("std") or STD), **clip)


def config_of(model: nn.Module) -> Mapping[str, Any]:
    """timm's notes on the model, or on the backbone inside it."""
    for module in model.modules():
        config = getattr(module, "pretrained_cfg", None)
        if config:
            return config
    return {}


def class_names(model: nn.Module) -> Sequence[str] | None:
    """Names that come with the weights; ImageNet's for 1000 classes."""
    names = config_of(model).get("label_names")
    if names:
        return list(names)
    if getattr(model, "num_classes", None) == 1000:
        from timm.data import ImageNetInfo

        info = ImageNetInfo()
        return [info.index_to_description(i).partition(",")[0] for i in range(1000)]
    return None


def _from_file(path: Path, options: dict[str, Any]) -> tuple[nn.Module, Card]:
    """The model of a checkpoint with other options than its own, if any are given, and what the file says of itself."""
    file = weights_file(path)
    state_dict = read_state_dict(file)  # names a missing or damaged file
    card = read_task_card(file)
    if card.task in ("segmentation", "detection"):
        if options:
            raise ValueError(f"{path} is a model for {card.task} and opens as it is, without {', '.join(options)}.")
        return open_task_model(file)
    model = create_model(card.name, **({"num_classes": card.num_classes} | card.kwargs | options))
    load_checkpoint(model, state_dict)
    return model, card if card.preprocess != Preprocess() else card._replace(preprocess=preprocess_of(model))


def _by_name(name: str, seed: int, options: dict[str, Any]) -> tuple[nn.Module, str, bool]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model(name, **options)
    known = get_pretrained_cfg(name, allow_unregistered=True)
    plain = name.partition(".")[0]
    tag = embedded_tag(plain) if name == plain and plain in list_models() and not options else None
    if tag or (known is not None and known.has_weights):  # an ablation is another model: it gets no weights unasked
        name = f"{plain}.{tag}" if tag else name
        return create_model(name, pretrained=True, **options), f"pretrained, {name}" if tag else "pretrained", True
    return model, f"fresh, seed {seed}", False
