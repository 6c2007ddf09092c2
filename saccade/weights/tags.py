"""Weights as tags of timm's registry: `timm.create_model("svit_nano.tiny_imagenet", pretrained=True)`.

Without a tag, `pretrained=True` uses the first embedded tag of a model, or else its first release.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import _registry, get_arch_pretrained_cfgs, get_pretrained_cfg, is_model
from torch import Tensor

from saccade import weights
from saccade.weights.releases import RELEASES, Release, find

_logger = logging.getLogger(__name__)


def add_tag(name: str, tag: str, **fields: Any) -> None:
    """Add a tag of a registered model to timm's registry, or replace it; `fields` change the model's configuration."""
    full, default = f"{name}.{tag}", get_pretrained_cfg(name, allow_unregistered=False)
    assert default is not None
    config = replace(default, tag=tag, architecture=name, **fields)
    tags: Any = _registry._model_default_cfgs[name]  # timm declares a PretrainedCfg, and stores a DefaultCfg
    if tag not in tags.cfgs:
        tags.tags.append(tag)
        _registry._model_with_tags[name].append(full)
    tags.cfgs[tag] = _registry._model_pretrained_cfgs[full] = config
    if config.has_weights:
        _registry._model_has_pretrained |= {name, full}


def register_released() -> None:
    """Add the classifiers to timm's registry. Those that a person has to download have no address there."""
    for release in RELEASES:
        if release.head:
            continue
        add_tag(
            release.model,
            release.tag,
            url="" if release.by_hand else release.url,
            license=release.licence or None,
            origin_url=release.url,
            notes=(release.accuracy,) if release.accuracy else None,
        )


def register_embedded() -> list[str]:
    """Add every classifier in the weights folder to timm's registry; return their names."""
    from saccade.models.card import read_card, timm_config  # it imports the registry, which imports this file

    names = []
    for name, path in weights.embedded().items():
        try:
            card = read_card(path)
            if card.task != "classification":
                continue
            if not is_model(card.name):
                raise ValueError(f"unknown model {card.name}.")
            add_tag(card.name, name.rpartition(".")[2], file=str(path), **timm_config(card))
            names.append(name)
        except (ValueError, OSError, SafetensorError) as error:  # a damaged file must not break `import saccade`
            _logger.warning("skipping %s: %s", path, error)
    return names


def embedded_tag(name: str) -> str | None:
    """The first tag of a model whose weights are embedded in the package, or None."""
    tags = get_arch_pretrained_cfgs(name)
    return next((config.tag for config in tags.values() if config.file), None)


def released_tag(name: str, kwargs: dict[str, Any]) -> Release | None:
    """The release that a caller's `pretrained_cfg` names: a tag, or None for the first release of the model."""
    tag, overlay = kwargs.get("pretrained_cfg") or "", kwargs.get("pretrained_cfg_overlay") or {}
    if not isinstance(tag, str) or overlay.keys() & {"url", "file", "hf_hub_id", "state_dict", "source"}:
        return None
    return find(f"{name}.{tag}" if tag else name)


def with_weights(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with the file of the pretrained weights: embedded, or released and downloaded on first use."""
    overlay, given = kwargs.get("pretrained_cfg_overlay") or {}, kwargs.get("pretrained_cfg")
    if not given and not overlay:
        given = embedded_tag(name)
        kwargs = kwargs | {"pretrained_cfg": given}
    if (release := released_tag(name, kwargs)) is not None:
        from saccade.weights.fetch import build_classifier, fetch  # it imports the registry, too

        folder = kwargs.get("cache_dir")
        path = fetch(release, build_classifier, Path(folder) if folder else None)
        return kwargs | {"pretrained_cfg": release.tag, "pretrained_cfg_overlay": {"file": str(path)} | overlay}
    registered = get_pretrained_cfg(f"{name}.{given}" if isinstance(given, str) else name)
    if overlay or (given and not isinstance(given, str)) or (registered is not None and registered.has_weights):
        return kwargs
    tag = f".{given}" if isinstance(given, str) else ""
    inflate = " The file of an image model also loads: it is inflated." if name.startswith("video_") else ""
    raise RuntimeError(
        f"expected published weights of {name}{tag}, got none. `saccade pull --list` lists the models that have some. "
        f"Train it, or load your own with saccade.load_checkpoint(model, path).{inflate}"
    )


def adapted(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The pretrained weights for a model with other options; tensors of another shape keep their initial values."""
    if not hasattr(model, "adapt_checkpoint"):
        return state_dict
    loaded, new, *_ = model.adapt_checkpoint(state_dict)
    initial = model.state_dict()
    return loaded | {key: initial[key] for key in new if key in initial}
