"""Registration with timm, construction, and the list of names."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

import timm
from timm.models import (
    _registry,
    build_model_with_cfg,
    register_model,
    register_notrace_function,
    register_notrace_module,
)
from torch import nn

from saccade.layers.conv import DepthwiseConv
from saccade.layers.grid import channels_last, check_images
from saccade.layers.norm import ChannelNorm, TokenNorm
from saccade.layers.position import AbsolutePosition
from saccade.weights.tags import adapted, released_tag, with_weights

for function in (check_images, channels_last):  # leaves for torch.fx: they branch on shapes
    register_notrace_function(function)
for layer in (TokenNorm, ChannelNorm, DepthwiseConv, AbsolutePosition):
    register_notrace_module(layer)

Model = TypeVar("Model", bound=nn.Module)


def leaf(module: type[Model]) -> type[Model]:
    """Register a module class as a leaf for torch.fx; unlike timm's decorator, it preserves the type."""
    register_notrace_module(module)
    return module


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet, as in all four papers


def pretrained_cfg(size: int = 224, **changes: Any) -> dict[str, Any]:
    """timm's configuration of a variant: input size, preprocessing, names of the first and last layers."""
    return {
        "input_size": (3, size, size),
        "pool_size": (size // 32,) * 2,
        "num_classes": 1000,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
        "classifier": "head.fc",
        "license": "apache-2.0",
    } | changes


def register(entrypoint: Callable[..., Model]) -> Callable[..., Model]:
    """timm's `register_model`, and listed under `timm.list_models(module="saccade")`.

    A tag may have options of the model, such as the number of clusters; the caller's options override them.
    """
    name = entrypoint.__name__

    @wraps(entrypoint)
    def create(pretrained: bool = False, **kwargs: Any) -> Model:
        release = released_tag(name, kwargs)
        return entrypoint(pretrained, **((release.options if release else {}) | kwargs))

    register_model(create)
    _registry._module_to_models["saccade"].add(name)
    return create


def build(cls: type[Model], name: str, pretrained: bool, **kwargs: Any) -> Model:
    """Build a variant with timm's builder, so that every timm keyword (features_only, in_chans, ...) works."""
    if pretrained:
        kwargs = with_weights(name, kwargs)
    out_indices = kwargs.pop("out_indices", (0, 1, 2, 3))
    registered: Any = timm.models.get_pretrained_cfg(name)  # declared with three sizes; a clip has four
    clip = registered.input_size if registered is not None and len(registered.input_size) == 4 else None
    if clip:  # timm's builder only supports images: it gets the size of one frame, replaced below
        overlay = {"input_size": (clip[0], *clip[2:])} | (kwargs.get("pretrained_cfg_overlay") or {})
        kwargs["pretrained_cfg_overlay"] = overlay
    kwargs.setdefault("pretrained_filter_fn", adapted)
    model: Any = build_model_with_cfg(
        cls, name, pretrained, feature_cfg={"out_indices": out_indices, "feature_cls": "getter"}, **kwargs
    )
    if clip:
        model.pretrained_cfg["input_size"] = clip
    return model


def choose(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError that names the choices if `value` is none of them."""
    if value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}; got {value!r}.")


def check_per_stage(stages: int, **options: Any) -> None:
    """Raise a ValueError unless every option has one value per stage."""
    for name, values in options.items():
        if not isinstance(values, Sequence) or len(values) != stages:
            raise ValueError(f"{name} must be {stages} numbers, one per stage; got {values!r}.")


def list_models(pattern: str = "") -> list[str]:
    """Names of saccade's models, sorted; `pattern` is a shell wildcard such as "svit*".

    Example:
        >>> saccade.list_models("vt_resnet*")
        ['vt_resnet101', 'vt_resnet18', 'vt_resnet34', 'vt_resnet50']
    """
    return sorted(timm.list_models(pattern, module="saccade"))


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a model by name, exactly as `timm.create_model` would.

    Example:
        >>> saccade.create_model("svit_nano", num_classes=10).num_classes
        10
    """
    if name.partition(".")[0].partition(":")[0] not in timm.list_models() and ":" not in name:
        close = get_close_matches(name, list_models(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown model {name!r}.{hint} saccade.list_models() lists all.")
    return timm.create_model(name, pretrained=pretrained, **kwargs)
