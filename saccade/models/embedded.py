"""Embedded weights as timm tags: `timm.create_model("svit_nano.tiny_imagenet", pretrained=True)`, offline.

Without a tag, `pretrained=True` uses the first embedded tag of a model.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import PretrainedCfg, _registry, get_pretrained_cfg, is_model

from saccade import weights
from saccade.models.card import Card, read_card, timm_config

_logger = logging.getLogger(__name__)


def register_embedded() -> list[str]:
    """Add every classifier in the weights folder to timm's registry; return their names."""
    names = []
    for name, path in weights.embedded().items():
        try:
            card = read_card(path)
            if card.task != "classification":
                continue
            register_tag(card, name.rpartition(".")[2], path)
            names.append(name)
        except (ValueError, OSError, SafetensorError) as error:  # a damaged file must not break `import saccade`
            _logger.warning("skipping %s: %s", path, error)
    return names


def register_tag(card: Card, tag: str, path: Path) -> None:
    """Register one file as a tag of its model."""
    if not is_model(card.name):
        raise ValueError(f"unknown model {card.name}.")
    default = get_pretrained_cfg(card.name, allow_unregistered=False)
    assert default is not None
    config = replace(default, file=str(path), tag=tag, architecture=card.name, **timm_config(card))
    add_tag(card.name, tag, config)


def add_tag(name: str, tag: str, config: PretrainedCfg) -> None:
    """Add a tag of a registered model to timm's registry, or replace it."""
    full = f"{name}.{tag}"
    tags: Any = _registry._model_default_cfgs[name]  # timm declares a PretrainedCfg, and stores a DefaultCfg
    if tag not in tags.cfgs:
        tags.tags.append(tag)
        _registry._model_with_tags[name].append(full)
    tags.cfgs[tag] = _registry._model_pretrained_cfgs[full] = config
    if config.has_weights:
        _registry._model_has_pretrained |= {name, full}
