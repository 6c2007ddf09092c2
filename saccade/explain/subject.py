"""The model to be explained: by name, from a checkpoint, or as it is; with all that is known about its input."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from saccade.explain.record import reporters
from saccade.models._build import MEAN, STD, create_model, list_models
from saccade.models._checkpoint import identify, load_checkpoint

SIZE = 224  # for models that do not say


class Subject(NamedTuple):
    model: nn.Module
    name: str
    weights: str  # where they are from, in words
    trained: bool
    labels: Sequence[str] | None  # class names
    size: int  # side of the square it was made for
    mean: tuple[float, ...]
    std: tuple[float, ...]

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
    model, for ablations.
    """
    options = dict(options or {})
    weights, trained = "as given", True
    if isinstance(model, nn.Module):
        name = config_of(model).get("architecture") or type(model).__name__
    elif str(model).partition(".")[0] in list_models():
        name = str(model)
        model, weights, trained = _by_name(name, seed, options)
    elif Path(model).exists() or Path(model).suffix in (".safetensors", ".pth", ".pt", ".bin"):
        weights, path = Path(model).name, Path(model)
        name, classes = identify(path)
        model = create_model(name, num_classes=classes, **options)
        load_checkpoint(model, path)
    else:
        model = create_model(str(model), **options)  # its error names the nearest model
        name = str(model)
    reporters(model)  # its error says what can be explained
    if device is not None:
        model = model.to(device)
    config = config_of(model)
    channels = getattr(model, "in_chans", 3)
    mean, std = tuple(config.get("mean") or MEAN), tuple(config.get("std") or STD)
    if channels == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    elif channels != 3:
        raise ValueError(f"{name} takes {channels} channels; pictures have 3 (or 1 with in_chans=1).")
    side = (config.get("input_size") or (3, SIZE, SIZE))[-1]
    return Subject(model, name, weights, trained, labels or class_names(model), side, mean, std)


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


def _by_name(name: str, seed: int, options: dict[str, Any]) -> tuple[nn.Module, str, bool]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model(name, **options)
    if config_of(model).get("url") or config_of(model).get("hf_hub_id") or config_of(model).get("file"):
        return create_model(name, pretrained=True, **options), "pretrained", True
    return model, f"fresh, seed {seed}", False
